package testsale

// rebuild makes a sale anew as a worker does, without Postgres: with these holders, in the next epoch.
// token names the rebuild of a test.
const Token = "token"
