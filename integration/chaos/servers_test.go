package chaos_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

const (
	roleGuardian      = "guardian"
	directoryVariable = "IDEMPOTENCY_SERVICES_DIR"
	scripts           = "../services/"
	// scriptPatience bounds one start or stop of a server, on a machine that has other things to do.
	scriptPatience = 5 * time.Minute
)

// The servers that are restarted, by the names that start.sh knows.
const (
	postgresql = "postgres"
	rabbitmq   = "rabbitmq"
	kafkaName  = "kafka"
)

var serverNames = []string{postgresql, rabbitmq, kafkaName}

// servers are started by the first test that needs them, and shared by all.
var servers cluster

type cluster struct {
	once     sync.Once
	err      error
	guardian *exec.Cmd
	lifeline io.Closer
	dir      string
	// direct are the addresses of the servers, for the judge; through the proxies go the consumers.
	direct, proxied addresses
	proxies         map[string]*toxiproxy.Proxy
}

// addresses of the servers: URLs of PostgreSQL and RabbitMQ, host and port of Kafka.
type addresses struct{ Postgres, AMQP, Kafka string }

func (c *cluster) start(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs servers: not run with -short")
	}
	c.once.Do(func() { c.err = c.open() })
	require.NoError(t, c.err)
}

func (c *cluster) open() error {
	var err error
	if c.dir, err = os.MkdirTemp("", "idempotency-chaos-"); err != nil {
		return err
	}
	if err := os.Chmod(c.dir, 0o755); err != nil { // PostgreSQL has a user of its own
		return err
	}
	c.guardian = exec.Command(os.Args[0])
	c.guardian.Env = scriptEnvironment(c.dir, roleVariable+"="+roleGuardian)
	c.guardian.Stderr = os.Stderr
	c.guardian.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // an interrupt of the test is not meant for it
	if c.lifeline, err = c.guardian.StdinPipe(); err != nil {
		return err
	}
	output, err := c.guardian.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.guardian.Start(); err != nil {
		return err
	}
	lines := bufio.NewScanner(output)
	if !lines.Scan() || lines.Text() != ready {
		return errors.New("the servers did not start: see above")
	}
	if err := c.readAddresses(); err != nil {
		return err
	}
	return c.openProxies()
}

// runGuardian owns the servers: it starts them, and removes them when its standard input ends, also because the test was
// killed.
func runGuardian() int {
	ctx, dir := context.Background(), os.Getenv(directoryVariable)
	if err := script(ctx, dir, "start.sh", serverNames...); err != nil {
		report("%v", err)
		fmt.Println("not " + ready)
	} else {
		fmt.Println(ready)
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	if err := script(ctx, dir, "stop.sh", "--purge"); err != nil {
		report("%v", err)
		return 1
	}
	if err := os.RemoveAll(dir); err != nil {
		report("%v", err)
		return 1
	}
	return 0
}

// stop ends all that open has begun.
func (c *cluster) stop() error {
	if c.guardian == nil {
		return nil
	}
	for _, proxy := range c.proxies {
		proxy.Stop()
	}
	_ = c.lifeline.Close()
	if err := c.guardian.Wait(); err != nil {
		return fmt.Errorf("remove the servers: %w", err)
	}
	return nil
}

// scriptEnvironment leaves out the addresses of other servers, which start.sh would use instead of starting some.
func scriptEnvironment(dir string, more ...string) []string {
	var environment []string
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "IDEMPOTENCY_") {
			environment = append(environment, entry)
		}
	}
	return append(environment, append(more, directoryVariable+"="+dir)...)
}

// script runs one of the scripts for the servers in dir.
func script(ctx context.Context, dir, name string, arguments ...string) error {
	ctx, cancel := context.WithTimeout(ctx, scriptPatience)
	defer cancel()
	cmd := exec.CommandContext(ctx, scripts+name, arguments...)
	cmd.Env = scriptEnvironment(dir)
	output := new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w:\n%s", name, strings.Join(arguments, " "), err, output)
	}
	return nil
}

func (c *cluster) readAddresses() error {
	content, err := os.ReadFile(filepath.Join(c.dir, "env"))
	if err != nil {
		return err
	}
	values := make(map[string]string)
	for line := range strings.Lines(string(content)) {
		name, value, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "export "), "=")
		values[name] = strings.Trim(value, "'")
	}
	c.direct = addresses{values["IDEMPOTENCY_POSTGRES_URL"], values["IDEMPOTENCY_AMQP_URL"], values["IDEMPOTENCY_KAFKA_BROKERS"]}
	return nil
}

func (c *cluster) openProxies() error {
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	c.proxies, c.proxied = make(map[string]*toxiproxy.Proxy), c.direct
	for name, address := range map[string]*string{postgresql: &c.proxied.Postgres, rabbitmq: &c.proxied.AMQP, kafkaName: &c.proxied.Kafka} {
		upstream := *address
		if parsed, err := url.Parse(*address); err == nil {
			upstream = parsed.Host
		}
		proxy, err := openProxy(server, name, upstream)
		if err != nil {
			return err
		}
		c.proxies[name] = proxy
		*address = strings.Replace(*address, upstream, proxy.Listen, 1)
	}
	return nil
}

// openProxy listens on a port below those that the system gives to outgoing connections: one of them could take the port
// while the proxy is stopped.
func openProxy(server *toxiproxy.ApiServer, name, upstream string) (proxy *toxiproxy.Proxy, err error) {
	for range 100 {
		proxy = toxiproxy.NewProxy(server, name, fmt.Sprintf("127.0.0.1:%d", 10_000+rand.IntN(10_000)), upstream)
		if err = proxy.Start(); err == nil {
			break
		}
	}
	return proxy, err
}

// crash ends a server as a crash does, by SIGKILL.
func (c *cluster) crash(ctx context.Context, name string) error {
	return script(ctx, c.dir, "stop.sh", "--kill", name)
}

// shut ends a server as an administrator does.
func (c *cluster) shut(ctx context.Context, name string) error {
	return script(ctx, c.dir, "stop.sh", name)
}

// restart starts a server that has ended, and waits until it answers.
func (c *cluster) restart(ctx context.Context, name string) error {
	before := c.direct
	if err := script(ctx, c.dir, "start.sh", name); err != nil {
		return err
	}
	if err := c.readAddresses(); err != nil {
		return err
	}
	if c.direct != before {
		return fmt.Errorf("%s has moved: %v is %v now", name, before, c.direct)
	}
	return nil
}

// stopImmediately does what "pg_ctl stop -m immediate" does: sessions end, nothing is written down, and the next start
// recovers. In a container there is no process to be found, and the server is killed.
func (c *cluster) stopImmediately(ctx context.Context) error {
	content, err := os.ReadFile(filepath.Join(c.dir, "data", postgresql, "cluster", "postmaster.pid"))
	if errors.Is(err, os.ErrNotExist) {
		return c.crash(ctx, postgresql)
	}
	if err != nil {
		return err
	}
	line, _, _ := strings.Cut(string(content), "\n")
	pid, err := strconv.Atoi(line)
	if err != nil {
		return err
	}
	if err := syscall.Kill(pid, syscall.SIGQUIT); err != nil {
		return err
	}
	if !within(30*time.Second, func() bool { return syscall.Kill(pid, 0) != nil }) {
		return fmt.Errorf("the server (process %d) does not end", pid)
	}
	return nil
}

// poison gives the connections to a server a toxic, or takes it away.
func (c *cluster) poison(server, kind, attributes string) error {
	_, err := c.proxies[server].Toxics.AddToxicJson(strings.NewReader(
		fmt.Sprintf(`{"name": "fault", "type": %q, "stream": "downstream", "attributes": %s}`, kind, attributes)))
	return err
}

func (c *cluster) heal(ctx context.Context, server string) error {
	return c.proxies[server].Toxics.RemoveToxic(ctx, "fault")
}

// within waits for a condition, and tells whether it came.
func within(d time.Duration, condition func() bool) bool {
	deadline := time.NewTimer(d)
	defer deadline.Stop()
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for !condition() {
		select {
		case <-again.C:
		case <-deadline.C:
			return condition()
		}
	}
	return true
}

func report(format string, arguments ...any) { fmt.Fprintf(os.Stderr, format+"\n", arguments...) }
