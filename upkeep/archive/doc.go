// Package archive moves the orders of a sale that is over from Postgres into a file, and brings them back.
//
// A file has the sale's row, its events, and the events of its orders; the rows of the orders follow from those. It is
// written, read back and compared before anything is deleted. Postgres keeps the row of the sale, which says where the
// orders are.
package archive
