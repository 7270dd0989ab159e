-- Returns the identity of this Redis server, whether the stock of the partition was verified on it,
-- its clock, and the epoch, the shard and the items of a sale.
--
-- A server is known if it is the verified process, and was not promoted since. The run id changes
-- with the process. The replication id changes with a promotion and when the first replica connects;
-- only a promotion keeps the previous id as the second one, so a first replica changes nothing. Any
-- other server was restarted, promoted or emptied, and may lack accepted orders.
--
-- A caller that gets unverified withdraws the verification. Otherwise a promoted server would
-- look known again after it has dropped the second id and its first replica connects.
--
-- KEYS
--   1  server  hash: run_id and replication_id of the verified server, or "-" if that was withdrawn; rebuild: the
--              token of the rebuild that wrote this (verify.lua)
--   2  sale    hash, as in reserve.lua; may be left out
-- Answers
--   {answer, run_id, replication_id, epoch, now, shard, items}: the server's ids, the epoch of the sale, which is
--   0 while it is closed for a rebuild, and empty if there is no sale, the time in milliseconds, and the
--   fields shard and items of the sale, empty if there are none
--   known       the stock in this partition is whole
--   unverified  another server was verified, or this one before a restart or promotion
--   distrusted  the verification was withdrawn
--   unrecorded  there is no record: the partition was never used, or Redis lost everything

local info = redis.call('INFO', 'server', 'replication')

-- The ids have 40 digits. Two plain searches are much cheaper than two patterns.
local function id(name)
  local _, at = string.find(info, '\n' .. name .. ':', 1, true)
  return at and string.sub(info, at + 1, at + 40) or ''
end

local run_id, replication_id = id('run_id'), id('master_replid')
local verified = redis.call('HMGET', KEYS[1], 'run_id', 'replication_id')
local sale = KEYS[2] and redis.call('HMGET', KEYS[2], 'epoch', 'shard', 'items') or {}

local answer = 'unverified'
if not verified[1] then
  answer = 'unrecorded'
elseif verified[1] == '-' then
  answer = 'distrusted'
elseif verified[1] == run_id and (verified[2] == replication_id or not string.find(id('master_replid2'), '[^0]')) then
  answer = 'known'
end
local time = redis.call('TIME')
return { answer, run_id, replication_id, sale[1] or '', string.format('%d%03d', time[1], math.floor(time[2] / 1000)), sale[2] or '', sale[3] or '' }
