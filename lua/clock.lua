-- Returns the clock of the server that has a key, such as a stream, the ids of whose entries hold this clock. TIME has no
-- key, so in a cluster any node would answer it.
--
-- KEYS
--   1  key
-- ARGV
--   none
-- Answers
--   the time in milliseconds, 0 if there is no such key

if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local time = redis.call('TIME')
return time[1] * 1000 + math.floor(time[2] / 1000)
