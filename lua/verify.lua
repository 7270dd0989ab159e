#!lua flags=allow-oom
-- Records that the stock of a partition is whole on this server, if it is still the server that the
-- caller worked on, with the same data: the token that the rebuild left in the record is still
-- there. The token is gone when the server was emptied or distrusted, or when another rebuild has
-- begun.
--
-- KEYS
--   1  server  hash, as in look.lua
-- ARGV
--   1  run_id          of the server that is verified
--   2  replication_id  of the same
--   3  token           of the rebuild, which it left in the record; "-" for the first user of a partition, where
--                      there is no record
-- Answers
--   verified  from now on the server is known
--   changed   another server, or the same after a restart or promotion, or the token is gone: nothing was done

local info = redis.call('INFO', 'server', 'replication')
local function is(name, id)
  return string.find(info, '\n' .. name .. ':' .. id .. '\r\n', 1, true)
end
if not (is('run_id', ARGV[1]) and is('master_replid', ARGV[2])) then return 'changed' end
local rebuild = redis.call('HGET', KEYS[1], 'rebuild')
if redis.call('EXISTS', KEYS[1]) == 0 then rebuild = '-' end
if rebuild ~= ARGV[3] then return 'changed' end
redis.call('HSET', KEYS[1], 'run_id', ARGV[1], 'replication_id', ARGV[2], 'rebuild', ARGV[3])
return 'verified'
