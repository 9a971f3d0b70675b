package postgres

import (
	"context"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// statement is one of those that go to the server together.
type statement struct {
	sql  string
	args []any
	read func(rows pgx.Rows) error // nil if there is nothing to read
}

// send takes one round trip. If a statement fails, the server skips those after it. It returns the tag of the last one.
func (s *Store) send(ctx context.Context, conn *pgx.Conn, statements ...statement) (pgconn.CommandTag, error) {
	if s.prepares {
		return sendPrepared(ctx, conn, statements)
	}
	return sendBatch(ctx, conn, statements)
}

// preparesStatements tells whether the connections of the pool prepare statements, and no tracer wants to see them: pgconn
// knows no tracers.
func preparesStatements(ctx context.Context, pool *pgxpool.Pool) (prepares bool, err error) {
	err = pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		config := conn.Conn().Config()
		prepares = config.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement && config.Tracer == nil
		return nil
	})
	return prepares, err
}

// builders hold the memory that parameters are encoded into.
var builders = sync.Pool{New: func() any { return new(pgx.ExtendedQueryBuilder) }}

// sendPrepared does what sendBatch does under [pgx.QueryExecModeCacheStatement], with half of the allocations.
func sendPrepared(ctx context.Context, conn *pgx.Conn, statements []statement) (last pgconn.CommandTag, err error) {
	var batch pgconn.Batch
	query := builders.Get().(*pgx.ExtendedQueryBuilder) //nolint:errcheck // it holds nothing else
	defer builders.Put(query)
	for _, s := range statements {
		prepared, err := conn.Prepare(ctx, s.sql, s.sql) // asks the server once per connection
		if err != nil {
			return last, err
		}
		if err := query.Build(conn.TypeMap(), prepared, s.args); err != nil {
			return last, err
		}
		batch.ExecStatement(prepared, query.ParamValues, query.ParamFormats, slices.Clone(query.ResultFormats))
	}
	results := conn.PgConn().ExecBatch(ctx, &batch)
	for i := 0; results.NextResult(); i++ {
		reader := results.ResultReader()
		if read := statements[i].read; read != nil && err == nil {
			err = read(pgx.RowsFromResultReader(conn.TypeMap(), reader))
		}
		last, _ = reader.Close() // Close of the results has the error
	}
	if failed := results.Close(); failed != nil {
		err = failed
	}
	return last, err
}

func sendBatch(ctx context.Context, conn *pgx.Conn, statements []statement) (last pgconn.CommandTag, err error) {
	batch := &pgx.Batch{}
	for _, s := range statements {
		queued := batch.Queue(s.sql, s.args...)
		if s.read != nil {
			queued.Query(s.read)
			continue
		}
		queued.Exec(func(tag pgconn.CommandTag) error {
			last = tag
			return nil
		})
	}
	err = conn.SendBatch(ctx, batch).Close()
	return last, err
}
