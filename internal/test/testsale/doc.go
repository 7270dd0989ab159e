// Package testsale is a shop for the tests of package reservation and its subpackages: a store and a
// catalog with their own key prefix and database.
package testsale
