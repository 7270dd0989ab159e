// Package testwork runs workers, rebuilds and audits on a testshop.Shop, in the process of the test
// or in one that it can kill.
package testwork
