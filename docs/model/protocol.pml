/*
 * The protocol of the middleware, for the model checker spin. README.md tells what is checked, and what is left out.
 * check.sh runs it: as it is, and with each of the changes in #ifdef, which must all be refuted.
 *
 * SCENARIO 1: one event in three messages: the event, a duplicate by its producer, other content under the same ID.
 * SCENARIO 2: two events in a message each.
 */

#ifndef SCENARIO
#define SCENARIO 1
#endif
#ifndef FAULTS
#define FAULTS 2	/* crashes, errors and lost answers in one run */
#endif
#ifndef REPLAYS
#define REPLAYS 1	/* deliveries of what has been acked, in one run */
#endif

#if SCENARIO == 1
#define event_of(m)	1
#define content_of(m)	(m == 2)
#else
#define event_of(m)	(m + 1)
#define content_of(m)	0
#endif

#define MESSAGES	3
#define EVENTS		2	/* numbered from 1 */
#define CONSUMERS	2
#define SESSIONS	4	/* one for each consumer, and two that consumers have lost */

byte faults = FAULTS;
byte replays = REPLAYS;
#define FAULT	faults > 0 -> faults--

/* The broker. */
mtype = { none, owed, acked, refused };
mtype message[MESSAGES] = none;
byte published[EVENTS + 1];	/* the UUID of what the event produced, 0 before it is published */

/* The database: what is committed, by event. */
bit claimed[EVENTS + 1];	/* the claim is there, */
bit fingerprint[EVENTS + 1];	/* with the content that was processed */
byte stored[EVENTS + 1];	/* the UUID of the stored produced message, 0 if there is none */
byte effects[EVENTS + 1];	/* business effects: the handler's writes */

/* The database: open transactions, one for each session. */
typedef Tx {
	byte event;	/* whose claim it holds, 0 if it is not open */
	bit content;	/* what it wrote: the fingerprint, */
	byte uuid;	/* the produced message, */
	bit effect;	/* the business effect */
	bit sent	/* COMMIT is on its way */
};
Tx tx[SESSIONS];

/* Time: the event is older than the replay horizon. */
bit old[EVENTS + 1];

/* The processes. */
bit busy[CONSUMERS];
bit crash[CONSUMERS];
bit remove[CONSUMERS * (EVENTS + 1)];
#define to_remove(c, e)	remove[c * (EVENTS + 1) + e]	/* a message of e was acked in c, and its stored messages are to be removed */

/* What only the checks look at. */
byte made[EVENTS + 1];		/* produced messages that handlers have made */
bit processed[EVENTS + 1];	/* the content that had the effect */
bit removed[EVENTS + 1];	/* the stored messages were removed after an ack */

#define held(e)	(tx[0].event == e || tx[1].event == e || tx[2].event == e || tx[3].event == e)

inline clear(s)
{
	d_step { tx[s].event = 0; tx[s].content = 0; tx[s].uuid = 0; tx[s].effect = 0; tx[s].sent = 0 }
}

/* commit makes what a transaction wrote visible, at once. */
inline commit(s)
{
	d_step {
		claimed[tx[s].event] = 1;
		fingerprint[tx[s].event] = tx[s].content;
		if
		:: tx[s].effect -> effects[tx[s].event]++; processed[tx[s].event] = tx[s].content
		:: else
		fi;
#ifndef NOTHING_STORED
		if
		:: tx[s].uuid -> stored[tx[s].event] = tx[s].uuid
		:: else
		fi;
#endif
		assert(effects[tx[s].event] <= 1);
		assert(claimed[tx[s].event] == effects[tx[s].event])
	};
	clear(s)
}

/* lose takes the session away from a consumer. The server ends its transaction, some time later: see World. */
inline lose(s)
{
	d_step {
		if
		:: tx[s].event && tx[2].event == 0 ->
			tx[2].event = tx[s].event; tx[2].content = tx[s].content; tx[2].uuid = tx[s].uuid;
			tx[2].effect = tx[s].effect; tx[2].sent = tx[s].sent
		:: tx[s].event && tx[2].event != 0 ->
			assert(tx[3].event == 0);	/* or there are too few sessions */
			tx[3].event = tx[s].event; tx[3].content = tx[s].content; tx[3].uuid = tx[s].uuid;
			tx[3].effect = tx[s].effect; tx[3].sent = tx[s].sent
		:: else
		fi
	};
	clear(s)
}

inline publish(e, u)
{
	d_step {
		assert(effects[e] == 1);				/* nothing of an attempt that was rolled back */
		assert(published[e] == 0 || published[e] == u);		/* one UUID */
		assert(!late);						/* nothing for a late duplicate */
		published[e] = u
	}
}

proctype Consumer(byte me)
{
	byte m, e, u;	/* the message, its event, the UUID of what is to be published */
	bit late;	/* what the event produced was acked by this process, or removed, before this delivery claimed */
#ifdef HORIZON_BEFORE_CLAIM
	bit young;
#endif

	/* A delivery. Two consumers may have the same message, as in a rebalance. */
end_idle:
	atomic {
		if
		:: message[0] == owed -> m = 0
		:: message[1] == owed -> m = 1
		:: message[2] == owed -> m = 2
		:: message[0] == acked && replays > 0 -> replays--; m = 0
		:: message[1] == acked && replays > 0 -> replays--; m = 1
		:: message[2] == acked && replays > 0 -> replays--; m = 2
		fi;
		e = event_of(m);
		busy[me] = 1
	};
	{
		late = 0;	/* spin wants no label here */
#ifdef HORIZON_BEFORE_CLAIM
		young = !old[e];
#endif

		/* BEGIN and the claim: a unique insert that waits for an uncommitted one. */
claim:
#ifdef CHECK_THEN_INSERT
		if
		:: claimed[e] -> goto duplicate
		:: !claimed[e]
		fi;
		d_step { tx[me].event = e; tx[me].content = content_of(m) };
#else
		atomic {
			if
			:: !held(e) && claimed[e] -> goto duplicate
			:: !held(e) && !claimed[e] -> tx[me].event = e; tx[me].content = content_of(m)
#ifdef IN_FLIGHT_AS_DUPLICATE
			:: held(e) -> u = 0; goto publishing
#endif
			:: FAULT;	/* no connection, no lock in time, cancelled */
#ifdef ERROR_AS_DUPLICATE
				u = 0; goto publishing
#else
				goto nack
#endif
			fi
		};
#endif
#ifdef CLAIM_APART
		d_step { claimed[e] = 1; fingerprint[e] = content_of(m); assert(claimed[e] == effects[e]) };
#endif

		/* The replay horizon: the record of an old event may be purged, so it is not taken for new. */
#ifndef NO_HORIZON
		atomic {
			if
#ifdef HORIZON_BEFORE_CLAIM
			:: !young -> clear(me); assert(old[e]); goto refuse
#else
			:: old[e] -> clear(me); goto refuse
#endif
			:: else
			fi
		};
#endif

		/* The handler, and what it produced. */
		atomic {
			if
			:: made[e]++; u = made[e]; tx[me].effect = 1; tx[me].uuid = u
			:: FAULT;	/* error, panic */
#ifdef COMMIT_ON_ERROR
				commit(me)
#else
				clear(me)
#endif
				; goto nack
			fi
		};
#ifdef STORED_APART
		tx[me].uuid = 0;
#endif
#ifdef PUBLISH_BEFORE_COMMIT
		publish(e, u);
#endif
#ifdef ACK_BEFORE_COMMIT
		atomic { message[m] = acked; assert(effects[e] >= 1) };
#endif

		/* COMMIT. */
		tx[me].sent = 1;
		atomic {
			if
			:: commit(me)
			:: FAULT; lose(me);	/* the answer is lost */
#ifdef UNKNOWN_AS_SUCCESS
				goto publishing
#else
				goto nack
#endif
			:: FAULT; clear(me);	/* it was a ROLLBACK */
#ifdef ROLLBACK_AS_SUCCESS
				goto publishing
#else
				if
				:: u = 0; goto claim	/* tried again in place */
				:: goto nack
				fi
#endif
			fi
		};
#ifdef STORED_APART
		stored[e] = u;
#endif
		goto publishing;

		/* The record of a duplicate, */
duplicate:
		atomic {
			late = removed[e] || to_remove(me, e);
			if
			:: !claimed[e] -> goto claim	/* purged since */
#ifndef NO_FINGERPRINT
			:: claimed[e] && fingerprint[e] != content_of(m) -> assert(processed[e] != content_of(m)); goto refuse
#endif
			:: else
			fi
		};

		/* and what the event has produced, read apart. */
		atomic {
			u = stored[e];
#ifndef NO_ACKED_CHECK
			if
			:: to_remove(me, e) -> u = 0	/* acked by this process */
			:: else
			fi;
#endif
#ifdef NEW_UUID
			if
			:: u -> made[e]++; u = made[e]
			:: else
			fi
#endif
		};

		/* The router: it publishes what the middleware returned, */
publishing:
#ifdef REMOVED_BEFORE_PUBLISH
		atomic {
			if
			:: u -> to_remove(me, e) = 1
			:: else
			fi
		};
#endif
		atomic {
			if
			:: u == 0
			:: u != 0 -> publish(e, u)
			:: u != 0 && FAULT;
				if
				:: publish(e, u)	/* the answer is lost */
				:: skip			/* the broker is down */
				fi;
#ifdef REMOVED_ON_NACK
				to_remove(me, e) = 1;
#endif
				goto nack
			fi
		};

		/* and acks. */
		atomic {
			assert(effects[e] >= 1);			/* nothing is lost, */
			assert(published[e] != 0);			/* nor what it produced, */
			assert(processed[e] == content_of(m));		/* nor another event under the same ID */
			if
			:: u -> to_remove(me, e) = 1
			:: else
			fi;
			if
			:: message[m] = acked
			:: FAULT	/* the broker does not learn of it */
			fi;
			goto done
		};

		/* Permanent errors go into quarantine: PoisonQueue publishes and acks. */
refuse:
		atomic { message[m] = refused; goto done };

nack:
#ifdef ACK_ON_ERROR
		atomic { message[m] = acked; assert(effects[e] >= 1) };
#endif
done:
		atomic { busy[me] = 0; m = 0; e = 0; u = 0; late = 0 }
	} unless {
		atomic {
			crash[me];
			lose(me);
			to_remove(me, 1) = 0; to_remove(me, 2) = 0;
			crash[me] = 0; busy[me] = 0; m = 0; e = 0; u = 0; late = 0
		}
	};
	goto end_idle
}

inline sweep(c, e)
{
	d_step {
		to_remove(c, e) -> to_remove(c, e) = 0;
#ifndef NOT_REMOVED
		stored[e] = 0;
#endif
		removed[e] = 1
	}
}

#ifdef PURGED_EARLY
#define outlived(e)	1
#else
#define outlived(e)	old[e]
#endif
#ifdef PURGED_UNACKED
#define confirmed(e)	1
#else
#define confirmed(e)	!stored[e]
#endif

inline purge(e)
{
	d_step { claimed[e] && outlived(e) && confirmed(e) -> claimed[e] = 0; fingerprint[e] = 0; stored[e] = 0 }
}

/* What happens beside the consumers, at any time. */
active proctype World()
{
end_world:
	do
	/* Crashes. */
	:: atomic { faults > 0 && busy[0] && !crash[0] -> faults--; crash[0] = 1 }
	:: atomic { faults > 0 && busy[1] && !crash[1] -> faults--; crash[1] = 1 }

	/* The server ends the transactions of lost sessions; the COMMIT may have reached it. */
	:: atomic { tx[2].event -> clear(2) }
	:: atomic { tx[3].event -> clear(3) }
	:: atomic { tx[2].event && tx[2].sent -> commit(2) }
	:: atomic { tx[3].event && tx[3].sent -> commit(3) }

	/* The stored messages of what is acked are removed. */
	:: sweep(0, 1)
	:: sweep(1, 1)
#if SCENARIO == 2
	:: sweep(0, 2)
	:: sweep(1, 2)
#endif

	/* Events become older than the horizon, and their records are purged, but for those with stored messages. */
	:: atomic { !old[1] -> old[1] = 1 }
	:: purge(1)
#if SCENARIO == 2
	:: atomic { !old[2] -> old[2] = 1 }
	:: purge(2)
#endif
	od
}

#define kept(m)		(message[m] != acked || effects[event_of(m)] == 1)
#define told(e)		(effects[e] == 0 || published[e] != 0)

/* In the end, nothing is owed. That every run comes to an end is checked by looking for cycles. */
active proctype End()
{
	timeout ->
	d_step {
		assert(message[0] != owed && message[1] != owed && message[2] != owed);
		assert(kept(0) && kept(1) && kept(2));
		assert(told(1) && told(2));
		assert(!tx[0].event && !tx[1].event && !tx[2].event && !tx[3].event)
	}
}

init {
	atomic {
		message[0] = owed;
		message[1] = owed;
#if SCENARIO == 1
		message[2] = owed;
#endif
		run Consumer(0);
		run Consumer(1)
	}
}
