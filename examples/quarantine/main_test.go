package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestQuarantine(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, run(t.Context(), &out))
	const ada, bob = `{"order":7,"to":"Ada"}`, `{"order":8,"to":"Bob"}`
	changing := regexp.MustCompile(`at \S+Z|[0-9a-f]{16}`)
	require.Equal(t, []string{
		"quarantined: " + bob,
		`reason:      idempotency: claim in handler "create-label" on topic "orders" for subscriber "shipping.create-label.v1", event "order-7-placed": ` +
			"event ID is used for another content: its payload differs from what was processed … (SHA-256 … then, … now): give each event an ID of its own",
		"label:       " + ada,
		"label:       " + ada,
		"label:       " + bob,
	}, strings.Split(strings.TrimSpace(changing.ReplaceAllString(out.String(), "…")), "\n"))
}
