// Mutants takes the safeties out of the library, one at a time, and runs the test that must notice. It fails if one does
// not: then the safety may go missing without anybody seeing it. The tree is not touched: the compiler is given the changed
// file by an overlay. Run it by "make mutate" (MUTANTS is a regular expression of what to take out).
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// parallel is how many mutants are tested at once.
const parallel = 2

// mutant is a change that takes one safety out.
type mutant struct {
	removes  string // the safety
	file     string // from the root of the repository, with slashes
	old, new string // old occurs once in the file
	pkg      string // the folder of the test
	run      string // the test, as in go test -run
}

func main() {
	run := flag.String("run", "", "a regular expression of what is taken out")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := check(ctx, *run)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func check(ctx context.Context, run string) error {
	pattern, err := regexp.Compile(run)
	if err != nil {
		return err
	}
	root, err := filepath.Abs("..") // from the module integration
	if err != nil {
		return err
	}
	var chosen []mutant
	for _, m := range slices.Concat(core, stores, beside) {
		if pattern.MatchString(m.removes) {
			chosen = append(chosen, m)
		}
	}
	began := time.Now()
	fmt.Println("--- the tests of", len(chosen), "mutants, without a mutant")
	if err := unchanged(ctx, root, chosen); err != nil {
		return err
	}
	fmt.Printf("--- %-11s %-75s %5s  %s\n", "in", "taken out", "time", "found by")
	var mu sync.Mutex
	var failed int
	inTurn(len(chosen), func(i int) {
		m := chosen[i]
		began := time.Now()
		test, err := m.try(ctx, root)
		took := time.Since(began)
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			failed++
			test = "NOT FOUND: " + err.Error()
		}
		fmt.Printf("%-15s %-75s %4.0fs  %s\n", filepath.Dir(m.file), m.removes, took.Seconds(), test)
	})
	fmt.Printf("%d of %d mutants found in %.0f s\n", len(chosen)-failed, len(chosen), time.Since(began).Seconds())
	if failed > 0 {
		return fmt.Errorf("%d mutants not found", failed)
	}
	return ctx.Err()
}

// inTurn calls do for each number below n, for a few at once.
func inTurn(n int, do func(i int)) {
	slots := make(chan struct{}, parallel)
	var all sync.WaitGroup
	for i := range n {
		slots <- struct{}{}
		all.Go(func() {
			do(i)
			<-slots
		})
	}
	all.Wait()
}

// unchanged runs the tests as the tree is: one that fails now would find anything.
func unchanged(ctx context.Context, root string, mutants []mutant) error {
	tests := make(map[string][]string)
	for _, m := range mutants {
		if !slices.Contains(tests[m.pkg], m.run) {
			tests[m.pkg] = append(tests[m.pkg], m.run)
		}
	}
	for pkg, runs := range tests {
		r, err := goTest(ctx, filepath.Join(root, pkg), "-run", strings.Join(runs, "|"))
		if err != nil {
			return fmt.Errorf("%s fails without a mutant: %w\n%s", cmpTest(r.failed, pkg), err, r.output)
		}
	}
	return nil
}

func cmpTest(test, pkg string) string {
	if test == "" {
		return "package " + pkg
	}
	return test
}

// try returns the first test that fails with the mutant. A mutant that does not compile, or a package that fails and no
// test, has shown nothing.
func (m mutant) try(ctx context.Context, root string) (test string, err error) {
	changed, err := m.apply(root)
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "mutant")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file, overlay := filepath.Join(dir, "mutant.go"), filepath.Join(dir, "overlay.json")
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(root, m.file): file}})
	if err != nil {
		return "", err
	}
	if err := errors.Join(os.WriteFile(file, changed, 0o600), os.WriteFile(overlay, replace, 0o600)); err != nil {
		return "", err
	}
	r, err := goTest(ctx, filepath.Join(root, m.pkg), "-overlay", overlay, "-run", m.run)
	switch {
	case err == nil:
		return "", fmt.Errorf("%s passes", m.run)
	case r.failed == "" && strings.Contains(r.output, "panic: test timed out"):
		return m.run + ", which does not end", nil
	case r.failed == "":
		return "", fmt.Errorf("no test fails, but: %w\n%s", err, r.output)
	}
	return r.failed, nil
}

// apply returns the changed file.
func (m mutant) apply(root string) ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(root, m.file)) //nolint:gosec // of the table
	if err != nil {
		return nil, err
	}
	if n := bytes.Count(text, []byte(m.old)); n != 1 {
		return nil, fmt.Errorf("%s has %d times, not once: %s", m.file, n, m.old)
	}
	return bytes.Replace(text, []byte(m.old), []byte(m.new), 1), nil
}

type result struct {
	failed string // the first test that failed, if one did
	output string // without that of tests that were skipped or passed
}

// goTest runs tests of the package in dir. The error is nil if all pass.
func goTest(ctx context.Context, dir string, args ...string) (result, error) {
	//nolint:gosec // the arguments are of this program
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json", "-count=1", "-vet=off", "-timeout=60s"}, args...)...)
	cmd.Dir = dir
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.Output()
	var r result
	var output strings.Builder
	for line := range bytes.Lines(stdout) {
		var event struct{ Action, Test, Output string }
		if json.Unmarshal(line, &event) != nil {
			output.Write(line)
			continue
		}
		output.WriteString(event.Output)
		if event.Action == "fail" && r.failed == "" {
			r.failed = event.Test
		}
	}
	output.Write(stderr.Bytes())
	r.output = output.String()
	if ctx.Err() != nil {
		err, r.failed = ctx.Err(), ""
	}
	return r, err
}
