// Package sqlstate knows what the codes of PostgreSQL's errors mean for a claim.
package sqlstate

import (
	"errors"
	"strings"

	"github.com/watermill-idempotency/idempotency"
)

// Codes, from appendix A of PostgreSQL's manual.
const (
	FeatureNotSupported   = "0A000"
	DivisionByZero        = "22012"
	ReadOnly              = "25006"
	InFailedTransaction   = "25P02"
	NoSuchStatement       = "26000"
	SerializationFailure  = "40001"
	DeadlockDetected      = "40P01"
	InsufficientPrivilege = "42501"
	LockNotAvailable      = "55P03"

	classConnection = "08"
	classResources  = "53"
	classShutdown   = "57P"
)

// Of returns the code of an error, or "". Errors of pgx and of lib/pq have it.
func Of(err error) string {
	var coded interface{ SQLState() string }
	if errors.As(err, &coded) {
		return coded.SQLState()
	}
	return ""
}

// IsOfSession tells whether a claim failed because of what its session is: one that a handler left read-only or in another
// role (SET ROLE) or without its prepared statements (DEALLOCATE ALL), one that has prepared them for tables that look
// different now, or one with a primary that has become a standby. On the same connection, every later claim would fail too.
func IsOfSession(err error) bool {
	switch Of(err) {
	case ReadOnly, InsufficientPrivilege, NoSuchStatement, FeatureNotSupported:
		return true
	}
	return false
}

// Classify tells what a code means for the message at hand.
func Classify(code string) idempotency.Fault {
	switch {
	case code == SerializationFailure, code == DeadlockDetected:
		return idempotency.FaultConflict
	case code == LockNotAvailable, code == ReadOnly,
		strings.HasPrefix(code, classConnection), strings.HasPrefix(code, classResources), strings.HasPrefix(code, classShutdown):
		return idempotency.FaultUnavailable
	}
	return idempotency.FaultOther
}
