package idempotency

import (
	"fmt"
	"sync"
)

// subscribers remembers which handler of this process uses which subscriber ID of which store. It is the package's only
// global state, on purpose: handlers that share an ID by mistake usually have a Middleware each, and would silently drop
// each other's events as duplicates.
var subscribers registry

type registry struct {
	mu       sync.Mutex
	handlers map[registration]string
}

type registration struct {
	scope        any // the store, or the Middleware that chooses it
	subscriberID string
}

// register notes that handler uses the subscriber ID. The same handler may come again: a router that was restarted, two
// instances of a service in one process.
func (r *registry) register(scope any, subscriberID, handler string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := registration{scope, subscriberID}
	first, ok := r.handlers[key]
	if ok && first != handler {
		return fmt.Errorf("%w: %q is used by handler %q already: give handler %q one of its own by WithSubscriberID",
			ErrSharedSubscriber, subscriberID, first, handler)
	}
	if r.handlers == nil {
		r.handlers = make(map[registration]string)
	}
	r.handlers[key] = handler
	return nil
}
