// Package retire lets sales that are over leave Redis. Redis holds the buyers of a sale so that it can decide their
// requests; when the sale has ended and every order of it is final in Postgres, nothing is left to decide.
//
// The retirement itself is a change of the sale like an operator's (catalog.Catalog.Retire): a revision in Postgres,
// which is then published to Redis. So a crash between the two, a rebuild, and several workers need no rules of their
// own. This package finds the sales and makes sure that Redis knows nothing of them that Postgres does not.
package retire
