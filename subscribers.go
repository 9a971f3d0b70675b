package idempotency

import (
	"fmt"
	"sync"
)

// registration remembers the subscriber ID of the handler that a middleware function wraps.
type registration struct {
	mu      sync.Mutex
	done    bool
	handler string
	id      string
	err     error
}

// resolve returns the subscriber ID of the handler, and notes once that the handler uses it.
func (r *registration) resolve(m *Middleware, handler string) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.done || r.handler != handler {
		r.done, r.handler = true, handler
		r.id, r.err = m.register(handler)
	}
	return r.id, r.err
}

func (m *Middleware) register(handler string) (string, error) {
	id := handler
	switch {
	case m.subscriberID != nil:
		id = *m.subscriberID
	case handler == "":
		return "", fmt.Errorf("%w: the message comes from no router that names its handler: use WithSubscriberID", ErrNoSubscriber)
	case m.subscriberPrefix != nil:
		id = *m.subscriberPrefix + handler
	}
	if err := checkSubscriberID(id); err != nil {
		return "", fmt.Errorf("%w: %q cannot be one: %w: use WithSubscriberID", ErrNoSubscriber, id, err)
	}
	return id, subscribers.add(m.scope, id, handler)
}

// subscribers remembers which handler of this process uses which subscriber ID of which store. It is the package's only
// global state, on purpose: handlers that share an ID by mistake usually have a Middleware each, and would silently drop
// each other's events as duplicates.
var subscribers registry

type registry struct {
	mu       sync.Mutex
	handlers map[subscriber]string
}

type subscriber struct {
	scope any // the store, or the Middleware that chooses it
	id    string
}

// add notes that handler uses the subscriber ID. The same handler may come again: from a router that was started anew, or
// a second instance of a service in one process. A handler without a name cannot be told from another.
func (r *registry) add(scope any, id, handler string) error {
	if handler == "" {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	key := subscriber{scope, id}
	first, ok := r.handlers[key]
	if ok && first != handler {
		return fmt.Errorf("%w: %q is used by handler %q already: give handler %q one of its own by WithSubscriberID",
			ErrSharedSubscriber, id, first, handler)
	}
	if r.handlers == nil {
		r.handlers = make(map[subscriber]string)
	}
	r.handlers[key] = handler
	return nil
}
