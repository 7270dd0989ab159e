#!lua flags=allow-oom
-- Records that the stock of a partition is whole on this server, if it is still the one that whoever
-- made it whole has worked on.
--
-- KEYS
--   1  server  hash, as in look.lua
-- ARGV
--   1  run_id          of the server that is vouched for
--   2  replication_id  of the same
-- Answers
--   vouched  from now on the server is known
--   changed  this is another one, or the same in another life: nothing was done

local info = redis.call('INFO', 'server', 'replication')
local function is(name, id)
  return string.find(info, '\n' .. name .. ':' .. id .. '\r\n', 1, true)
end
if not (is('run_id', ARGV[1]) and is('master_replid', ARGV[2])) then return 'changed' end
redis.call('HSET', KEYS[1], 'run_id', ARGV[1], 'replication_id', ARGV[2])
return 'vouched'
