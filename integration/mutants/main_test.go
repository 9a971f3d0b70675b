package main

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a mutant changes must still be there: else it has shown nothing since.
func TestMutantsFitTheCode(t *testing.T) {
	t.Parallel()
	for _, m := range slices.Concat(core, stores, beside) {
		_, err := m.apply("../..")
		require.NoError(t, err, m.removes)
		require.DirExists(t, "../../"+m.pkg)
	}
}
