package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
)

func TestFirstDeliveryIsProcessedAndTheSecondIsADuplicate(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handle := b.Middleware.Middleware(idempotency.Handler(createLabel))

	for range 3 {
		produced, err := handle(order("1"))
		require.NoError(t, err)
		require.Empty(t, produced)
	}
	require.Equal(t, []string{"label for 1"}, b.store.Effects())
	require.Equal(t, []idempotency.Outcome{idempotency.Processed, idempotency.Duplicate, idempotency.Duplicate}, b.observed.outcomes())

	first, second := b.observed.all()[0], b.observed.all()[1]
	require.Equal(t, idempotency.Key{SubscriberID: "shipping", EventID: "1"}, first.Key)
	require.Equal(t, 1, first.Attempt)
	require.Positive(t, first.Claim)
	require.Positive(t, first.Handle)
	require.Positive(t, first.Commit)
	require.WithinDuration(t, time.Now(), second.ClaimedAt, time.Minute)
}

func TestHandlerErrorRollsBackAndIsReturnedAsItIs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handle := b.Middleware.Middleware(writeThen(func(*message.Message) ([]*message.Message, error) {
		return []*message.Message{order("produced")}, errBusiness
	}))
	for range 2 { // the second attempt is no duplicate
		produced, err := handle(order("1"))
		require.Same(t, errBusiness, err)
		require.Nil(t, produced)
	}
	require.Empty(t, b.store.Effects())
	require.Equal(t, []idempotency.Outcome{idempotency.HandlerFailed, idempotency.HandlerFailed}, b.observed.outcomes())
	require.Empty(t, b.logs.Captured(), "the router logs what is returned")
}

func TestHandlerErrorOfTheDatabaseIsTransient(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, err := b.Middleware.Middleware(func(*message.Message) ([]*message.Message, error) {
		return nil, fmt.Errorf("insert label: %w", errDown)
	})(order("1"))
	require.ErrorIs(t, err, errDown)
	require.True(t, idempotency.IsTransient(err))
	var where *idempotency.Error
	require.ErrorAs(t, err, &where)
	require.Equal(t, idempotency.OpHandler, where.Op)
	require.Equal(t, []idempotency.Outcome{idempotency.Transient}, b.observed.outcomes())
}

func TestTrap02_AbortedTransactionIsNeverAcked(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handle := b.Middleware.Middleware(idempotency.Handler(func(_ context.Context, tx *idempotencytest.MemTx, _ *message.Message) ([]*message.Message, error) {
		tx.Abort(errors.New("duplicate key")) // and the handler goes on as if nothing had happened
		return nil, nil
	}))
	_, err := handle(order("1"))
	require.ErrorIs(t, err, idempotency.ErrRolledBack)
	require.False(t, idempotency.IsTransient(err))
	require.Equal(t, []idempotency.Outcome{idempotency.HandlerFailed}, b.observed.outcomes())
}

func TestTrap03_LostCommitAnswerIsAnErrorAndTheRedeliveryDecides(t *testing.T) {
	t.Parallel()
	for _, applied := range []bool{true, false} {
		t.Run(fmt.Sprintf("applied=%v", applied), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			lost := errors.New("unexpected EOF")
			if applied {
				b.store.FailCommit(lost)
			} else {
				b.store.commit = func(context.Context) error { return lost }
			}
			handle := b.Middleware.Middleware(writeThen(func(*message.Message) ([]*message.Message, error) {
				return []*message.Message{order("produced")}, nil
			}))

			produced, err := handle(order("1"))
			require.ErrorIs(t, err, idempotency.ErrCommitUnknown)
			require.ErrorIs(t, err, lost)
			require.True(t, idempotency.IsTransient(err))
			require.Nil(t, produced)

			b.store.commit = nil
			produced, err = handle(order("1"))
			require.NoError(t, err)
			require.Len(t, produced, 1)
			require.Equal(t, []string{"label for 1"}, b.store.Effects())
			second := idempotency.Processed
			if applied {
				second = idempotency.Duplicate
			}
			require.Equal(t, []idempotency.Outcome{idempotency.CommitUnknown, second}, b.observed.outcomes())
		})
	}
}

func TestTrap04_ClaimErrorIsNeverADuplicate(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.store.claim = func(context.Context, idempotency.Claim) error { return errDown }
	called := false
	produced, err := b.Middleware.Middleware(func(*message.Message) ([]*message.Message, error) {
		called = true
		return nil, nil
	})(order("1"))
	require.ErrorIs(t, err, errDown)
	require.True(t, idempotency.IsTransient(err))
	require.Nil(t, produced)
	require.False(t, called)
	require.EqualError(t, err, `idempotency: claim for subscriber "shipping", event "1": the database is down`)
}

func TestTrap05_SecondInstallationLetsPass(t *testing.T) {
	t.Parallel()
	copying := func(next message.HandlerFunc) message.HandlerFunc { // a middleware that decrypts, say
		return func(msg *message.Message) ([]*message.Message, error) {
			inner := msg.Copy()
			inner.SetContext(msg.Context())
			return next(inner)
		}
	}
	same := func(next message.HandlerFunc) message.HandlerFunc { return next }
	for name, test := range map[string]struct {
		between message.HandlerMiddleware
		inner   []idempotency.Option
	}{
		"same message":     {same, nil},
		"copy":             {copying, nil},
		"other subscriber": {same, []idempotency.Option{idempotency.WithSubscriberID("create-label")}},
		"other key":        {same, []idempotency.Option{idempotency.WithKey(idempotency.MetadataKey("none"))}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			inner, err := idempotency.New(b.store, append([]idempotency.Option{
				idempotency.WithSubscriberID("shipping"), idempotency.WithLogger(b.logs), idempotency.WithObserver(b.observed),
			}, test.inner...)...)
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // a second claim would wait for the first
			defer cancel()

			handle := b.Middleware.Middleware(test.between(inner.Middleware(idempotency.Handler(createLabel))))
			for range 2 {
				msg := order("1")
				msg.SetContext(ctx)
				_, err = handle(msg)
				require.NoError(t, err)
			}
			require.Equal(t, []string{"label for 1"}, b.store.Effects())
			require.Equal(t, []idempotency.Outcome{idempotency.Processed, idempotency.Duplicate}, b.observed.outcomes())
			require.Len(t, b.logs.Captured()[watermill.InfoLogLevel], 1, "told once")
		})
	}
}

func TestMessageOfItsOwnInsideAHandlerIsClaimed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	inner := b.Middleware.Middleware(idempotency.Handler(createLabel))
	outer := b.Middleware.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		next := order("2")
		next.SetContext(msg.Context()) // as GoChannel does with PreserveContext
		return inner(next)
	})
	_, err := outer(order("1"))
	require.NoError(t, err)
	require.Len(t, b.observed.all(), 2)
	require.Equal(t, []string{"label for 2"}, b.store.Effects())
}

func TestTrap07_EarlyAckIsToldAndItsProducedMessagesAreKept(t *testing.T) {
	t.Parallel()
	b := setup(t)
	fail := true
	handle := b.Middleware.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		msg.Ack()
		if fail {
			return nil, errBusiness
		}
		return []*message.Message{order("produced")}, nil
	})
	_, err := handle(order("1"))
	require.ErrorIs(t, err, errBusiness)
	fail = false
	_, err = handle(order("1"))
	require.NoError(t, err)
	for _, e := range b.observed.all() {
		require.True(t, e.EarlyAck)
	}
	require.Len(t, b.observed.all(), 2)
	require.Len(t, b.logs.Captured()[watermill.ErrorLogLevel], 2, "one for each")

	require.NoError(t, b.Flush(t.Context()))
	produced, err := handle(order("1"))
	require.NoError(t, err)
	require.Len(t, produced, 1, "the early ack confirms no publish")
}

func TestTrap08_MarkRollbackWinsOverASwallowedError(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handle := b.Middleware.Middleware(writeThen(func(msg *message.Message) ([]*message.Message, error) {
		require.NoError(t, idempotency.MarkRollback(msg.Context(), errBusiness))
		require.NoError(t, idempotency.MarkRollback(msg.Context(), errDown)) // the first counts
		return []*message.Message{order("produced")}, nil                    // as AckCommandHandlingErrors does
	}))
	produced, err := handle(order("1"))
	require.ErrorIs(t, err, idempotency.ErrRolledBack)
	require.ErrorIs(t, err, errBusiness)
	require.NotErrorIs(t, err, errDown)
	require.Nil(t, produced)
	require.Empty(t, b.store.Effects())
	require.Equal(t, []idempotency.Outcome{idempotency.HandlerFailed}, b.observed.outcomes())
}

func TestMarkRollbackAndAnotherErrorAreBothReturned(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handle := b.Middleware.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		require.NoError(t, idempotency.MarkRollback(msg.Context(), nil))
		return nil, errBusiness
	})
	_, err := handle(order("1"))
	require.ErrorIs(t, err, errBusiness)
	require.ErrorIs(t, err, idempotency.ErrRolledBack)
}

func TestTrap10_PanicAndGoexitRollBack(t *testing.T) {
	t.Parallel()
	type value struct{ text string }
	thrown := &value{"boom"}

	t.Run("panic", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		msg := order("1")
		ctx := msg.Context()
		func() {
			defer func() { require.Same(t, thrown, recover(), "the panic value is unchanged") }()
			_, _ = b.Middleware.Middleware(writeThen(func(*message.Message) ([]*message.Message, error) { panic(thrown) }))(msg)
		}()
		require.Equal(t, ctx, msg.Context())
		requireNew(t, b)
	})
	t.Run("goexit", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = b.Middleware.Middleware(writeThen(func(*message.Message) ([]*message.Message, error) {
				runtime.Goexit() // t.FailNow in a handler does that
				return nil, nil
			}))(order("1"))
		}()
		<-done
		requireNew(t, b)
	})
}

// requireNew tells that event 1 has left no trace: it is processed as new.
func requireNew(t *testing.T, b *bundle) {
	t.Helper()
	require.Equal(t, []idempotency.Outcome{idempotency.HandlerPanicked}, b.observed.outcomes())
	require.Empty(t, b.store.Effects())
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	msg := order("1")
	msg.SetContext(ctx)
	_, err := b.Middleware.Middleware(idempotency.Handler(createLabel))(msg)
	require.NoError(t, err)
	require.Equal(t, []string{"label for 1"}, b.store.Effects())
}

func TestTrap11_HandlerThatSucceededIsCommittedThoughItsContextIsCancelled(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ctx, cancel := context.WithCancel(t.Context())
	handle := b.Middleware.Middleware(writeThen(func(*message.Message) ([]*message.Message, error) {
		cancel() // the router closes
		return nil, nil
	}))
	msg := order("1")
	msg.SetContext(ctx)
	_, err := handle(msg)
	require.NoError(t, err)
	require.Equal(t, []string{"label for 1"}, b.store.Effects())
}

func TestTrap11_HandlerThatWasCancelledIsRolledBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ctx, cancel := context.WithCancel(t.Context())
	handle := b.Middleware.Middleware(writeThen(func(msg *message.Message) ([]*message.Message, error) {
		cancel()
		return nil, msg.Context().Err()
	}))
	msg := order("1")
	msg.SetContext(ctx)
	_, err := handle(msg)
	require.ErrorIs(t, err, context.Canceled)
	require.True(t, idempotency.IsTransient(err))
	require.Empty(t, b.store.Effects())

	_, err = handle(msg) // with the context that was cancelled
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, []idempotency.Outcome{idempotency.Transient, idempotency.Transient}, b.observed.outcomes())
}

func TestTrap12_InFlightPolicies(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		policy idempotency.InFlight
		want   idempotency.Outcome
	}{
		"wait":         {idempotency.Wait(), idempotency.Duplicate},
		"wait at most": {idempotency.WaitAtMost(20 * time.Millisecond), idempotency.ClaimInFlight},
		"fail fast":    {idempotency.FailFast(), idempotency.ClaimInFlight},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, idempotency.WithInFlight(test.policy))
			entered, leave := make(chan struct{}), make(chan struct{})
			slow := b.Middleware.Middleware(writeThen(func(*message.Message) ([]*message.Message, error) {
				close(entered)
				<-leave
				return nil, nil
			}))
			first := make(chan error, 1)
			go func() { _, err := slow(order("1")); first <- err }()
			<-entered

			second := make(chan error, 1)
			go func() { _, err := slow(order("1")); second <- err }()
			if test.want == idempotency.ClaimInFlight {
				err := <-second
				require.ErrorIs(t, err, idempotency.ErrInFlight)
				require.True(t, idempotency.IsTransient(err), "it is not acked, and not for a dead-letter queue")
				close(leave)
			} else {
				close(leave)
				require.NoError(t, <-second)
			}
			require.NoError(t, <-first)
			require.ElementsMatch(t, []idempotency.Outcome{test.want, idempotency.Processed}, b.observed.outcomes())
			require.Equal(t, []string{"label for 1"}, b.store.Effects())
		})
	}
}

func TestTrap14_ContextIsRestoredOnEveryExit(t *testing.T) {
	t.Parallel()
	type contextKey struct{}
	for name, handler := range map[string]message.HandlerFunc{
		"processed": func(*message.Message) ([]*message.Message, error) { return nil, nil },
		"failed":    func(*message.Message) ([]*message.Message, error) { return nil, errBusiness },
		"timeout": func(msg *message.Message) ([]*message.Message, error) {
			ctx, cancel := context.WithCancel(msg.Context()) // as middleware.Timeout, which leaves it so
			cancel()
			msg.SetContext(ctx)
			return nil, ctx.Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			msg := order("1")
			ctx := context.WithValue(t.Context(), contextKey{}, name)
			msg.SetContext(ctx)
			_, _ = b.Middleware.Middleware(handler)(msg)
			require.Equal(t, ctx, msg.Context())
			_, ok := idempotency.ClaimFromContext(msg.Context())
			require.False(t, ok)
		})
	}
}

func TestTrap14_NothingOfAFailedAttemptReachesTheNext(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var contexts []context.Context
	handle := b.Middleware.Middleware(writeThen(func(msg *message.Message) ([]*message.Message, error) {
		require.JSONEq(t, `{"order":1}`, string(msg.Payload))
		require.Equal(t, "uuid of 1", msg.UUID)
		require.Empty(t, msg.Metadata.Get("attempted"))
		contexts = append(contexts, msg.Context())
		msg.Metadata.Set("attempted", "yes")
		msg.Metadata.Set(idempotency.EventIDMetadata, "another")
		msg.UUID = "another"
		msg.Payload[0] = 'x'
		if len(contexts) == 1 {
			require.NoError(t, idempotency.AfterCommit(msg.Context(), func(context.Context) error { t.Error("of a failed attempt"); return nil }))
			return []*message.Message{order("produced")}, errBusiness
		}
		return nil, nil
	}))
	msg := order("1")
	_, err := handle(msg) // as middleware.Retry does
	require.ErrorIs(t, err, errBusiness)
	produced, err := handle(msg)
	require.NoError(t, err)
	require.Empty(t, produced)
	require.Equal(t, []string{"label for 1"}, b.store.Effects())

	_, err = idempotency.TxFromContext[*idempotencytest.MemTx](contexts[0])
	require.ErrorIs(t, err, idempotency.ErrTxEnded)
}

// Copies are pooled: that of a failed message must not be the next message's.
func TestTrap14_CopyOfAFailedMessageIsItsOwn(t *testing.T) {
	t.Parallel()
	for name, came := range map[string]struct {
		metadata message.Metadata
		payload  message.Payload
	}{
		"content": {message.Metadata{"name": "placed", "source": "eu"}, message.Payload("payload")},
		"empty":   {message.Metadata{}, message.Payload{}},
		"none":    {nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, idempotency.WithKey(idempotency.MessageUUID()))
			fail := b.Middleware.Middleware(func(msg *message.Message) ([]*message.Message, error) {
				msg.Payload, msg.Metadata = message.Payload("spoilt"), message.Metadata{"spoilt": "yes"}
				return nil, errBusiness
			})
			succeed := b.Middleware.Middleware(writeThen(func(*message.Message) ([]*message.Message, error) { return nil, nil }))
			msg := message.NewMessage("failed", slices.Clone(came.payload))
			msg.Metadata = maps.Clone(came.metadata)
			for i := range 100 { // the pool drops some under the race detector
				_, err := fail(msg)
				require.ErrorIs(t, err, errBusiness)
				_, err = succeed(order(strconv.Itoa(i)))
				require.NoError(t, err)
				require.Equal(t, came.metadata, msg.Metadata)
				require.Equal(t, came.payload, msg.Payload)
			}
		})
	}
}

func TestCommitIsBoundedByATimerThatCommitsShare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := setup(t, idempotency.WithCommitTimeout(8*time.Second))
		type key struct{}
		var bounds []time.Duration
		b.store.commit = func(ctx context.Context) error {
			require.Equal(t, "value", ctx.Value(key{}))
			began, ended := time.Now(), make(chan struct{})
			stop := context.AfterFunc(ctx, func() { close(ended) })
			defer stop()
			all := make([]byte, 1<<20)
			require.NotContains(t, string(all[:runtime.Stack(all, true)]), "created by context.(*cancelCtx).propagateCancel",
				"the standard library finds the context that ends")
			if len(bounds) == 1 { // one that shares, and ends in time
				bounds = append(bounds, 0)
				return nil
			}
			<-ended
			require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
			bounds = append(bounds, time.Since(began))
			return ctx.Err()
		}
		deliver := func(eventID string) error {
			ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
			handle := b.Middleware.Middleware(writeThen(func(*message.Message) ([]*message.Message, error) {
				cancel()
				return nil, nil
			}))
			msg := order(eventID)
			msg.SetContext(ctx)
			_, err := handle(msg)
			return err
		}
		require.ErrorIs(t, deliver("1"), idempotency.ErrCommitUnknown)
		require.NoError(t, deliver("2"))
		time.Sleep(time.Second) //nolint:forbidigo // synctest's clock
		require.ErrorIs(t, deliver("3"), context.DeadlineExceeded)
		time.Sleep(time.Second) //nolint:forbidigo // synctest's clock
		require.ErrorIs(t, deliver("4"), context.DeadlineExceeded)
		require.Equal(t, []time.Duration{8 * time.Second, 0, 7 * time.Second, 8 * time.Second}, bounds)
	})
}

func TestTrap38_NothingTurnsACommittedMessageIntoAFailure(t *testing.T) {
	t.Parallel()
	b := setup(t, idempotency.WithObserver(idempotency.ObserverFunc(func(context.Context, idempotency.Event) { panic("observer") })))
	var ran []string
	handle := b.Middleware.Middleware(writeThen(func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		require.NoError(t, idempotency.AfterCommit(ctx, func(context.Context) error { ran = append(ran, "1"); panic("hook") }))
		require.NoError(t, idempotency.AfterCommit(ctx, func(ctx context.Context) error {
			ran = append(ran, "2")
			_, deadline := ctx.Deadline()
			require.True(t, deadline)
			require.NoError(t, ctx.Err())
			return errBusiness
		}))
		require.NoError(t, idempotency.AfterCommit(ctx, func(context.Context) error { ran = append(ran, "3"); return nil }))
		return []*message.Message{order("produced")}, nil
	}))
	produced, err := handle(order("1"))
	require.NoError(t, err)
	require.Len(t, produced, 1)
	require.Equal(t, []string{"1", "2", "3"}, ran)
	require.Equal(t, []string{"label for 1"}, b.store.Effects())

	e := b.observed.all()[0]
	require.Equal(t, idempotency.Processed, e.Outcome)
	require.ErrorIs(t, e.HookErr, errBusiness)
	require.ErrorContains(t, e.HookErr, "panic: hook")
	require.Len(t, b.logs.Captured()[watermill.ErrorLogLevel], 2, "the hooks' errors and the observer's panic")
}

func TestAfterCommitDoesNotRunAfterAFailedCommit(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.store.commit = func(context.Context) error { return fmt.Errorf("%w: deferred constraint", idempotency.ErrRolledBack) }
	_, err := b.Middleware.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		return nil, idempotency.AfterCommit(msg.Context(), func(context.Context) error { t.Error("must not run"); return nil })
	})(order("1"))
	require.ErrorIs(t, err, idempotency.ErrRolledBack)
}
