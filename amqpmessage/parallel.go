package amqpmessage

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Parallel returns a subscriber that subscribes n times for each Subscribe and hands all messages to one channel, so that a
// router's handler has n messages in flight: a subscription of watermill-amqp waits for the ack of a message before it
// hands over the next, whatever its prefetch count. n handlers with one subscriber ID are no way to it: the idempotency
// middleware refuses them.
//
// Messages are not in order any more. The store's pool needs n connections. Each subscription has its own channel and
// prefetch count, on one connection. A queue that allows one consumer (Consume.Exclusive, x-single-active-consumer) has one
// message in flight all the same.
//
// Close closes subscriber. The result is safe for concurrent use if subscriber is.
func Parallel(subscriber message.Subscriber, n int) (message.Subscriber, error) {
	if subscriber == nil {
		return nil, errors.New("amqpmessage: Parallel: the subscriber is nil")
	}
	if n < 1 {
		return nil, fmt.Errorf("amqpmessage: Parallel: %d subscriptions: take one or more", n)
	}
	return &parallel{Subscriber: subscriber, n: n, closing: make(chan struct{})}, nil
}

type parallel struct {
	message.Subscriber
	n       int
	closing chan struct{}
	once    sync.Once
}

// Subscribe implements message.Subscriber. It subscribes n times, or not at all.
func (p *parallel) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	ctx, cancel := context.WithCancel(ctx)
	out := make(chan *message.Message)
	var open sync.WaitGroup
	defer func() {
		go func() {
			open.Wait()
			close(out)
			cancel()
		}()
	}()
	for i := range p.n {
		in, err := p.Subscriber.Subscribe(ctx, topic)
		if err != nil {
			cancel()
			return nil, fmt.Errorf("amqpmessage: subscription %d of %d to %q: %w", i+1, p.n, topic, err)
		}
		open.Go(func() { p.forward(ctx, in, out) })
	}
	return out, nil
}

// forward hands over what comes in, until that is closed. What nobody takes any more goes back.
func (p *parallel) forward(ctx context.Context, in <-chan *message.Message, out chan<- *message.Message) {
	for msg := range in {
		select {
		case out <- msg:
		case <-p.closing:
			msg.Nack()
		case <-ctx.Done():
			msg.Nack()
		}
	}
}

// Close implements message.Subscriber.
func (p *parallel) Close() error {
	p.once.Do(func() { close(p.closing) })
	return p.Subscriber.Close()
}
