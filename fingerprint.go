package idempotency

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// ConflictError means that a message carries the event ID of an event that has been processed, and other content. It is
// never processed and never acked as a duplicate: either the producer has used one ID for two events, or it has changed an
// event after the fact. errors.Is(err, [ErrConflict]) is true, and [IsPermanent]: middleware.PoisonQueueWithFilter puts the
// message into quarantine. To process it there after all, give it an event ID of its own.
type ConflictError struct {
	Key Key
	// ClaimedAt is when the event was claimed by the delivery that processed it, by the database's clock.
	ClaimedAt time.Time
	// Processed is the fingerprint of that delivery, Received that of the refused one.
	Processed, Received []byte
	// Differs names what is not the same: "type", "source", "payload".
	Differs []string
}

// Error implements error. It shows the beginnings of the fingerprints' digests.
func (e *ConflictError) Error() string {
	const shown = 8
	digest := func(fingerprint []byte) []byte {
		return fingerprint[min(digestStart, len(fingerprint)):min(digestStart+shown, len(fingerprint))]
	}
	return fmt.Sprintf("%v: its %s differs from what was processed at %s (SHA-256 %x then, %x now): give each event an ID of its own",
		ErrConflict, strings.Join(e.Differs, " and "), e.ClaimedAt.UTC().Format(time.RFC3339Nano), digest(e.Processed), digest(e.Received))
}

// Unwrap returns [ErrConflict].
func (*ConflictError) Unwrap() error { return ErrConflict }

// fingerprint takes and compares fingerprints. Options set it up, and seal ends that.
type fingerprint struct {
	off            bool
	typeMetadata   []string
	sourceMetadata []string
	canonical      func(payload []byte) ([]byte, error)
	isCanonical    bool

	// scheme is what two fingerprints must have in common to be compared.
	scheme uint32
}

// defaultFingerprint looks where CloudEvents have their type and source, and Watermill's CQRS marshalers the name of a type.
func defaultFingerprint() fingerprint {
	return fingerprint{
		typeMetadata:   append(cloudEventSpellings("type"), "name"),
		sourceMetadata: cloudEventSpellings("source"),
	}
}

// The layout of a fingerprint: the scheme, a checksum of each part of the content, which only tells what differs, and the
// SHA-256 of all parts, which decides.
const (
	digestStart     = 4 + 3*4
	fingerprintSize = digestStart + sha256.Size
)

var contentParts = [3]string{"type", "source", "payload"}

func (f *fingerprint) seal() {
	f.scheme = crc32.ChecksumIEEE(fmt.Appendf(nil, "1 %q %q %t", f.typeMetadata, f.sourceMetadata, f.isCanonical))
}

// of returns the fingerprint of a message. It depends on nothing that brokers, retries and replays change: not on the
// UUID, other metadata, or the topic.
func (f *fingerprint) of(msg *message.Message) ([]byte, error) {
	if f.off {
		return nil, nil
	}
	payload := []byte(msg.Payload)
	if f.isCanonical && len(payload) > 0 {
		err := guard(func() (err error) {
			payload, err = f.canonical(payload)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrNotCanonical, err)
		}
	}
	eventType, source := firstSet(msg.Metadata, f.typeMetadata), firstSet(msg.Metadata, f.sourceMetadata)

	// What is hashed begins with the lengths: no two contents look the same in it.
	const lengths = 8 + 8
	buffer := make([]byte, fingerprintSize+lengths+len(eventType)+len(source)) // one for both: what hash/crc32 reads is on the heap
	sum, head := buffer[:0:fingerprintSize], buffer[fingerprintSize:fingerprintSize]
	head = binary.BigEndian.AppendUint64(head, uint64(len(eventType)))
	head = binary.BigEndian.AppendUint64(head, uint64(len(source)))
	typeStart := len(head)
	head = append(head, eventType...)
	sourceStart := len(head)
	head = append(head, source...)
	hash := sha256.New()
	hash.Write(head)
	hash.Write(payload)

	sum = binary.BigEndian.AppendUint32(sum, f.scheme)
	for _, part := range [...][]byte{head[typeStart:sourceStart], head[sourceStart:], payload} {
		sum = binary.BigEndian.AppendUint32(sum, crc32.ChecksumIEEE(part))
	}
	return hash.Sum(sum), nil
}

// firstSet returns the metadata with the first of the names that is set.
func firstSet(metadata message.Metadata, names []string) string {
	for _, name := range names {
		if value, ok := metadata[name]; ok {
			return value
		}
	}
	return ""
}

// compare returns a *[ConflictError] if a duplicate has other content than what was processed. A record without a
// fingerprint, or with one of another scheme, tells nothing.
func (f *fingerprint) compare(received []byte, record *Record) error {
	processed := record.Fingerprint
	if f.off || len(processed) != fingerprintSize || !bytes.Equal(processed[:4], received[:4]) ||
		bytes.Equal(processed[digestStart:], received[digestStart:]) {
		return nil
	}
	e := &ConflictError{Key: record.Key, ClaimedAt: record.ClaimedAt, Processed: processed, Received: received}
	for i, part := range contentParts {
		checksum := 4 + 4*i
		if !bytes.Equal(processed[checksum:checksum+4], received[checksum:checksum+4]) {
			e.Differs = append(e.Differs, part)
		}
	}
	if e.Differs == nil { // two payloads with one checksum
		e.Differs = []string{"payload"}
	}
	return e
}
