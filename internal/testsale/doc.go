// Package testsale is a shop for the tests of package reservation and of those below it: a store
// and a catalog on servers, a key prefix and a database of their own.
package testsale
