// Package sqlstore is the store on database/sql.
package sqlstore
