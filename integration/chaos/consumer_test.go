package chaos_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/postgres"
)

// consumerSpec is what a consumer is told, as JSON in its roleVariable.
type consumerSpec struct {
	Transport, Schema     string
	Orders, Labels, Dead  string
	Direct, Via           addresses
	Seed                  uint64
	Failures, Panics      float64 // shares of the handler's calls
	DieAt                 point   // "" is nowhere
	DieOnCall, PoolOfSize int
}

// A consumer prints ready once it runs, and then what became of each delivery: the word outcome, and the outcome.
const (
	ready   = "ready"
	outcome = "outcome "
)

// logDescriptor is of the file that a consumer logs to.
const logDescriptor = 3

// What a consumer is told on its standard input. When that ends, so does the consumer.
const (
	commandDie     = "die"     // point, and the number of the call
	commandExhaust = "exhaust" // take all connections of the pool for a moment
)

// How a consumer ends that was asked to.
const (
	endedWell = iota
	endedOrphaned
	endedAtStart
	endedByItself // the router has stopped
	endedUnclosed // the router did not close
	endedBusy     // a connection was not given back to the pool
	endedLeaking  // a goroutine of the library was left
)

const errInjected = fault("a fault of the test")

type fault string

func (f fault) Error() string { return string(f) }

// ledger is a consumer: it enters each order with an effect and a label, and notes, downstream, each label.
type ledger struct {
	consumerSpec
	reaper *reaper
	logger watermill.LoggerAdapter
	pool   *pgxpool.Pool
	idem   *idempotency.Middleware
	router *message.Router

	mu   sync.Mutex // guards dice
	dice *rand.Rand
}

func runConsumer(spec string) int {
	// The parent shows what is logged if a round fails.
	l := &ledger{reaper: &reaper{}, logger: watermill.NewStdLoggerWithOut(os.NewFile(logDescriptor, "log"), false, false)}
	if err := json.Unmarshal([]byte(spec), &l.consumerSpec); err != nil {
		report("consumer: %v", err)
		return endedAtStart
	}
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, syscall.SIGTERM)
	l.dice = rand.New(rand.NewPCG(l.Seed, 0))
	l.reaper.arm(l.DieAt, l.DieOnCall)
	go l.obey()

	// The servers may be down, or go down meanwhile.
	var err error
	if !within(patience, func() bool { err = l.open(); return err == nil }) {
		report("consumer: start: %v", err)
		return endedAtStart
	}
	ended := make(chan error, 1)
	go func() { ended <- l.router.Run(context.Background()) }()
	select {
	case <-l.router.Running():
		fmt.Println(ready)
	case err := <-ended:
		report("consumer: run: %v", err)
		return endedAtStart
	}
	select {
	case err := <-ended:
		report("consumer: the router has ended by itself: %v", err)
		return endedByItself
	case <-terminated:
		return l.close()
	}
}

// obey does what the parent says, and ends the process with it.
func (l *ledger) obey() {
	commands := bufio.NewScanner(os.Stdin)
	for commands.Scan() {
		words := strings.Split(commands.Text(), "\t")
		switch words[0] {
		case commandDie:
			call := 0
			_, _ = fmt.Sscan(words[2], &call)
			l.reaper.arm(point(words[1]), call)
		case commandExhaust:
			go l.exhaust()
		}
	}
	os.Exit(endedOrphaned)
}

// exhaust takes connections until the pool has none, and longer than a claim waits for one.
func (l *ledger) exhaust() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*acquireTimeout)
	defer cancel()
	for {
		conn, err := l.pool.Acquire(ctx)
		if err != nil {
			return
		}
		defer conn.Release()
	}
}

const acquireTimeout = 250 * time.Millisecond

func (l *ledger) open() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if l.pool == nil {
		address, err := withApplicationName(l.Via.Postgres, l.Schema)
		if err != nil {
			return err
		}
		config, err := pgxpool.ParseConfig(address)
		if err != nil {
			return err
		}
		config.MaxConns = int32(l.PoolOfSize)
		config.ConnConfig.ConnectTimeout = 3 * time.Second
		config.ConnConfig.RuntimeParams["search_path"] = l.Schema
		config.ConnConfig.DialFunc = l.reaper.dial
		if l.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
			return err
		}
	}
	store, err := postgres.New(ctx, l.pool, postgres.WithAcquireTimeout(acquireTimeout))
	if err != nil {
		return err
	}
	l.idem, err = idempotency.New(mortalStore{store, l.reaper},
		idempotency.WithSubscriberPrefix(l.Transport+"."), idempotency.WithObserver(idempotency.ObserverFunc(tell)),
		idempotency.WithCommitTimeout(3*time.Second), idempotency.WithLogger(l.logger))
	if err != nil {
		return err
	}
	return l.openRouter()
}

// tell writes at once what the parent counts: the process may be killed at any moment.
func tell(_ context.Context, e idempotency.Event) { fmt.Println(outcome + e.Outcome.String()) }

func (l *ledger) openRouter() error {
	broker := newTransport(l.Transport, l.Via, l.Direct)
	publisher, err := broker.publisher()
	if err != nil {
		return err
	}
	deadLetters, err := broker.publisher()
	if err != nil {
		return err
	}
	orders, err := broker.subscriber(l.Orders)
	if err != nil {
		return err
	}
	labels, err := broker.subscriber(l.Labels)
	if err != nil {
		return err
	}
	poison, err := middleware.PoisonQueueWithFilter(deadLetters, l.Dead, idempotency.IsPermanent)
	if err != nil {
		return err
	}
	if l.router, err = message.NewRouter(message.RouterConfig{CloseTimeout: 30 * time.Second}, l.logger); err != nil {
		return err
	}
	l.router.AddMiddleware(poison, l.arrive, l.idem.Middleware)
	if l.Seed%2 == 0 { // without, the router itself recovers a panic, and nacks
		l.router.AddMiddleware(middleware.Recoverer)
	}
	l.router.AddHandler("create", l.Orders, mortalSubscriber{orders, l.reaper}, l.Labels,
		&mortalPublisher{Publisher: publisher, reaper: l.reaper}, idempotency.Handler(l.create))
	l.router.AddConsumerHandler("note", l.Labels, labels, idempotency.ConsumerHandler(l.note))
	return nil
}

// close ends the service as a deployment does. The database may be down, and Flush fail: what must hold is that the router
// closes, and nothing is left behind in the process.
func (l *ledger) close() int {
	if err := l.router.Close(); err != nil {
		report("consumer: close the router: %v:\n%s", err, stacks())
		return endedUnclosed
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := l.idem.Flush(ctx); err != nil {
		fmt.Println("flush failed")
	}
	if !within(10*time.Second, func() bool { return l.pool.Stat().AcquiredConns() == 0 }) {
		report("consumer: %d connections are in use after the end", l.pool.Stat().AcquiredConns())
		return endedBusy
	}
	l.pool.Close()
	if !within(10*time.Second, func() bool { return strings.Count(stacks(), libraryFrame) == 0 }) {
		report("consumer: goroutines are left:\n%s", stacks())
		return endedLeaking
	}
	return endedWell
}

// libraryFrame begins the functions of the library in stacks and race reports.
const libraryFrame = "github.com/watermill-idempotency/idempotency."

func stacks() string {
	buffer := make([]byte, 1<<20)
	return string(buffer[:runtime.Stack(buffer, true)])
}

// order is the payload of an event. Two orders with one event ID and another content are a conflict.
type order struct{ Event, Content string }

func (l *ledger) create(ctx context.Context, tx pgx.Tx, msg *message.Message) ([]*message.Message, error) {
	var o order
	if err := json.Unmarshal(msg.Payload, &o); err != nil {
		return nil, err
	}
	label := message.NewMessage(watermill.NewUUID(), []byte(o.Event))
	if _, err := tx.Exec(ctx, "insert into effect values ($1, $2, $3, $4)", l.Transport+".create", o.Event, o.Content, label.UUID); err != nil {
		return nil, err
	}
	switch dice := l.throw(); {
	case dice < l.Panics:
		panic(errInjected)
	case dice < l.Panics+l.Failures:
		return nil, errInjected
	case dice > 0.9: // some work takes longer
		if _, err := tx.Exec(ctx, "select pg_sleep(0.05)"); err != nil {
			return nil, err
		}
	}
	return []*message.Message{label}, nil
}

func (l *ledger) throw() float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dice.Float64()
}

// arrive commits that a label has arrived, whatever becomes of it.
func (l *ledger) arrive(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		if message.HandlerNameFromCtx(msg.Context()) == "note" && msg.UUID != "" { // or it is a phantom
			if _, err := l.pool.Exec(msg.Context(), "insert into arrival values ($1, $2, $3)", l.Transport, msg.UUID, string(msg.Payload)); err != nil {
				return nil, err
			}
		}
		return next(msg)
	}
}

func (l *ledger) note(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
	id := msg.Metadata.Get(idempotency.EventIDMetadata)
	_, err := tx.Exec(ctx, "insert into effect values ($1, $2, $3, $4)", l.Transport+".note", id, string(msg.Payload), msg.UUID)
	return err
}
