package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTable(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, run(t.Context(), &out))
	var got []string
	for line := range strings.Lines(out.String()) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	require.Equal(t, []string{
		"without with the middleware",
		"orders 20 20",
		"events published 26 26",
		"deliveries 80 80",
		"attempts that failed 2 2",
		"events processed 78 21",
		"duplicates skipped - 57",
		"refused by the business rule - 1",
		"labels created 78 20",
	}, got)
}
