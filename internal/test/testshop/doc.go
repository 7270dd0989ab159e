// Package testshop is a shop for tests: sales, buyers and orders on a database and a Redis key
// prefix of their own. It knows no worker; package testwork runs workers on it.
package testshop
