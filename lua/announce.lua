-- Appends a message to a stream that nothing depends on: neither the append-only file nor a replica gets it, so it costs
-- Redis no wait for its disk.
--
-- KEYS
--   1  stream
-- ARGV
--   1  kept  about how many messages are kept
--   2  field, and its value
--   and so on: two for each further field
-- Answers
--   the id of the entry

pcall(redis.set_repl, redis.REPL_NONE) -- a server without it logs the message
return redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', unpack(ARGV, 2))
