package idempotency_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The root package compiles Watermill and the standard library, so that a service pays for the store that it uses only.
func TestRootPackageIsLight(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{with .Module}}{{.Path}}{{end}}{{end}}", ".").Output()
	require.NoError(t, err)
	modules := make(map[string]bool)
	for _, module := range strings.Fields(string(out)) {
		modules[module] = true
	}
	for _, light := range []string{
		"github.com/watermill-idempotency/idempotency",
		"github.com/ThreeDotsLabs/watermill",
		// Watermill's own:
		"github.com/google/uuid", "github.com/lithammer/shortuuid/v3", "github.com/oklog/ulid", "github.com/pkg/errors",
	} {
		delete(modules, light)
	}
	require.Empty(t, modules)
}
