#!lua flags=allow-oom
-- Records that the stock of a partition is complete on this server, if it is still the server that
-- the caller worked on, with the same data: the record still has the token of the rebuild. The token
-- is gone if the server was emptied or its verification withdrawn, or if another rebuild has begun.
--
-- KEYS
--   1  server  hash, as in look.lua
-- ARGV
--   1  run_id          of the server that is verified
--   2  replication_id  of that server
--   3  token           of the rebuild, which it left in the record; "-" for the first user of a
--                      partition, which has no record
-- Answers
--   verified  the server is known from now on
--   changed   another server, or this one was restarted or promoted, or the token is gone: nothing was done

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
