package integration_test

const childVariable = "IDEMPOTENCY_TEST_CHILD"
