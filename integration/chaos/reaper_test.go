package chaos_test

import (
	"bytes"
	"context"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-idempotency/idempotency"
)

// point is where a consumer kills itself, in the delivery of an order.
type point string

const (
	beforeClaim  point = "before the claim"
	afterClaim   point = "after the claim"
	beforeCommit point = "before the commit"
	commitSent   point = "commit sent" // the server has committed, and its answer is not read
	afterCommit  point = "after the commit"
	afterPublish point = "after the publish"
	beforeAck    point = "before the ack" // the router has acked, and the broker does not know
)

var points = []point{beforeClaim, afterClaim, beforeCommit, commitSent, afterCommit, afterPublish, beforeAck}

// reaper kills its process at a point. What follows wraps, from outside, what a message passes on its way.
type reaper struct {
	mu    sync.Mutex
	at    point
	calls int // until then

	atCommit atomic.Bool
}

func (r *reaper) arm(at point, call int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.at, r.calls = at, call
}

func (r *reaper) reach(at point) {
	if r.isNext(at) {
		r.kill()
	}
}

func (r *reaper) isNext(at point) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.at != at || r.calls <= 0 {
		return false
	}
	r.calls--
	return r.calls == 0
}

func (*reaper) kill() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// mortalStore has the points about the transaction.
type mortalStore struct {
	idempotency.Store
	*reaper
}

func (s mortalStore) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Tx, *idempotency.Record, error) {
	if !isOfOrder(c.Key) {
		return s.Store.Claim(ctx, c)
	}
	s.reach(beforeClaim)
	tx, record, err := s.Store.Claim(ctx, c)
	if tx == nil {
		return nil, record, err
	}
	s.reach(afterClaim)
	return mortalTx{tx, s.reaper}, nil, nil
}

type mortalTx struct {
	idempotency.Tx
	*reaper
}

func (t mortalTx) Commit(ctx context.Context, produced []*message.Message) error {
	t.reach(beforeCommit)
	if t.isNext(commitSent) {
		t.atCommit.Store(true)
	}
	err := t.Tx.Commit(ctx, produced)
	if err == nil {
		t.reach(afterCommit)
	}
	return err
}

// dial returns a connection that ends the process between the answer to a COMMIT and its reading.
func (r *reaper) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	return &mortalConn{conn, r}, err
}

type mortalConn struct {
	net.Conn
	*reaper
}

// answerToCommit is how the server says, in its protocol, that it has committed: CommandComplete with its length.
var answerToCommit = []byte("C\x00\x00\x00\x0bCOMMIT\x00")

func (c *mortalConn) Read(data []byte) (int, error) {
	n, err := c.Conn.Read(data)
	if c.atCommit.Load() && bytes.Contains(data[:n], answerToCommit) {
		c.kill()
	}
	return n, err
}

type mortalPublisher struct {
	message.Publisher
	*reaper
	// In the adapters, Publish and Close at once, as the router does them, are a data race.
	closing sync.RWMutex
}

func isOfOrder(key idempotency.Key) bool { return strings.HasSuffix(key.SubscriberID, ".create") }

func (p *mortalPublisher) Publish(topic string, messages ...*message.Message) error {
	p.closing.RLock()
	defer p.closing.RUnlock()
	if err := p.Publisher.Publish(topic, messages...); err != nil || len(messages) == 0 {
		return err
	}
	p.reach(afterPublish)
	return nil
}

func (p *mortalPublisher) Close() error {
	p.closing.Lock()
	defer p.closing.Unlock()
	return p.Publisher.Close()
}

// mortalSubscriber hands on each message as another one, and so comes between the router's ack and the broker.
type mortalSubscriber struct {
	message.Subscriber
	*reaper
}

func (s mortalSubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	in, err := s.Subscriber.Subscribe(ctx, topic)
	if err != nil {
		return nil, err
	}
	out := make(chan *message.Message)
	go func() { //nolint:contextcheck // the message's context is its own
		defer close(out)
		for original := range in {
			msg := original.Copy()
			msg.SetContext(original.Context())
			out <- msg
			go s.handOn(msg, original)
		}
	}()
	return out, nil
}

func (s mortalSubscriber) handOn(msg, original *message.Message) {
	select {
	case <-msg.Acked():
		s.reach(beforeAck)
		original.Ack()
	case <-msg.Nacked():
		original.Nack()
	}
}
