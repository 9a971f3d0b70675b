// Package metadata turns the metadata of stored produced messages into bytes and back, the same way for all stores.
package metadata

import (
	"encoding/json"
	"fmt"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// encoded keeps entries that are not valid UTF-8 apart: JSON would replace their bytes.
type encoded struct {
	Text   map[string]string `json:"text,omitempty"`
	Binary []binaryEntry     `json:"binary,omitempty"`
}

type binaryEntry struct {
	Name  []byte `json:"name"`
	Value []byte `json:"value"`
}

// Encode returns m as JSON, readable for operators and without loss.
func Encode(m message.Metadata) ([]byte, error) {
	e := encoded{Text: make(map[string]string, len(m))}
	for name, value := range m {
		if utf8.ValidString(name) && utf8.ValidString(value) {
			e.Text[name] = value
		} else {
			e.Binary = append(e.Binary, binaryEntry{[]byte(name), []byte(value)})
		}
	}
	return json.Marshal(e)
}

// Decode reverses [Encode]. The result is never nil.
func Decode(data []byte) (message.Metadata, error) {
	var e encoded
	if err := json.Unmarshal(data, &e); err != nil {
		return nil, fmt.Errorf("stored metadata: %w", err)
	}
	m := make(message.Metadata, len(e.Text)+len(e.Binary))
	for name, value := range e.Text {
		m[name] = value
	}
	for _, entry := range e.Binary {
		m[string(entry.Name)] = string(entry.Value)
	}
	return m, nil
}
