package chaos_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// process is a consumer.
type process struct {
	cmd        *exec.Cmd
	log        string // the name of the file with what the consumer logs
	commands   io.WriteCloser
	isReady    chan struct{}
	ended      chan struct{} // closed once it has
	deliveries atomic.Int32
}

// tally counts what the consumers of a test have told, and what was done to them.
type tally struct {
	mu     sync.Mutex
	counts map[string]int
}

func (t *tally) add(what string, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.counts == nil {
		t.counts = make(map[string]int)
	}
	t.counts[what] += n
}

// startProcess starts a consumer; it is not ready yet.
func (w *world) startProcess(spec consumerSpec, t *tally) (*process, error) {
	encoded, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	log, err := os.CreateTemp(servers.dir, "consumer.*.log")
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	p := &process{cmd: exec.Command(os.Args[0]), log: log.Name(), isReady: make(chan struct{}), ended: make(chan struct{})}
	p.cmd.ExtraFiles = []*os.File{log}
	p.cmd.Env = append(os.Environ(), roleVariable+"="+string(encoded),
		// What is a race in the adapters, when they reconnect, is not judged here.
		"GORACE=exitcode=0 log_path="+filepath.Join(servers.dir, "race"))
	p.cmd.Stderr = os.Stderr
	if p.commands, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	output, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.ended)
		lines := bufio.NewScanner(output)
		for lines.Scan() {
			switch told, is := strings.CutPrefix(lines.Text(), outcome); {
			case is:
				t.add(outcome+told, 1)
				p.deliveries.Add(1)
			case lines.Text() == ready:
				close(p.isReady)
			default:
				t.add(lines.Text(), 1)
			}
		}
		_ = p.cmd.Wait()
	}()
	return p, nil
}

// startPatience is how long a consumer may take to start; then it is killed, and another one started: its connection to a
// broker may hang.
const startPatience = 30 * time.Second

// awaitReady returns an error if it has ended before.
func (p *process) awaitReady() error {
	select {
	case <-p.isReady:
		return nil
	case <-p.ended:
		return fmt.Errorf("the consumer ended before it was ready: %v", p.cmd.ProcessState)
	case <-time.After(startPatience):
		return errors.New("the consumer was not ready in time")
	}
}

// lastWords returns the end of what the consumer has logged.
func (p *process) lastWords() string {
	content, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(content[max(0, len(content)-4_000):])
}

func (p *process) command(words ...string) {
	_, _ = io.WriteString(p.commands, strings.Join(words, "\t")+"\n") // it may have ended
}

// kill ends it at once.
func (p *process) kill() error {
	_ = p.cmd.Process.Kill()
	return p.awaitKilled()
}

// awaitKilled waits for the end of a process that is killed, or kills itself. That it has ended otherwise is an error.
func (p *process) awaitKilled() error {
	if err := p.awaitEnd(); err != nil {
		return err
	}
	if status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() {
		return fmt.Errorf("the consumer ended by itself: %v", p.cmd.ProcessState)
	}
	return nil
}

// terminate asks it to end, and returns an error if it does not end well.
func (p *process) terminate() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	if err := p.awaitEnd(); err != nil {
		return err
	}
	if code := p.cmd.ProcessState.ExitCode(); code != endedWell {
		return fmt.Errorf("the consumer did not end well: %v", p.cmd.ProcessState)
	}
	return nil
}

func (p *process) awaitEnd() error {
	defer func() { _ = p.commands.Close() }()
	select {
	case <-p.ended:
		return nil
	case <-time.After(patience):
		_ = p.cmd.Process.Signal(syscall.SIGQUIT) // it prints its goroutines
		return errors.New("the consumer did not end in time")
	}
}
