package amqpmessage_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

// patience is how long the tests wait for what must happen.
const patience = time.Minute

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
