#!lua flags=allow-oom
-- Deletes the buyers of a sale that is over and of which every order is final. What stays of the sale
-- is a constant: its terms and its epoch, with which late callers are answered that it has ended, and
-- which keep a late publisher from opening it again.
--
-- Changes of a sale are applied in the order of their revisions, each exactly once: a repeat is
-- unchanged, and a change that comes too early is not applied before its predecessors.
--
-- Runs at maxmemory too: it frees memory.
--
-- KEYS
--   1  sale    hash, as in reserve.lua
--   2  buyers  hash, as in reserve.lua
--   3  ended   hash, as in reserve.lua
-- ARGV
--   1  epoch     of the sale's stock that the caller expects
--   2  revision  that this change makes of the sale's definition
-- Answers
--   retired             the buyers are gone, and Postgres answers for them
--   unchanged           the sale has this revision, or a later one
--   gap <revision>      the sale has this revision; those between are not applied yet
--   illegal <state>     a sale in this state sells, by the clock of this server too
--   unknown-sale        there is no such sale
--   stale-epoch         the sale's stock was rebuilt since the caller last looked, or is being rebuilt

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'revision', 'state', 'generation', 'sequence', 'opens_at_ms', 'closes_at_ms',
  'per_order_limit', 'payment_window_s', 'shard', 'items', 'limit')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] or ARGV[1] == '0' then return 'stale-epoch' end
if tonumber(ARGV[2]) <= tonumber(sale[2]) then return 'unchanged' end
if tonumber(ARGV[2]) > sale[2] + 1 then return 'gap ' .. sale[2] end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local closes_at_ms = tonumber(sale[7])
if sale[3] ~= 'ended' and not (closes_at_ms > 0 and now_ms >= closes_at_ms) then return 'illegal ' .. sale[3] end

if not (redis.acl_check_cmd('UNLINK', KEYS[1]) and redis.acl_check_cmd('UNLINK', KEYS[2]) and redis.acl_check_cmd('UNLINK', KEYS[3])
    and redis.acl_check_cmd('HSET', KEYS[1], 'epoch', ARGV[1])) then
  return redis.error_reply('NOPERM nothing was deleted: this user of Redis must be allowed UNLINK and HSET of ' .. KEYS[1])
end

redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
-- A caller that does not look at the state finds no stock.
redis.call('HSET', KEYS[1], 'epoch', sale[1], 'revision', ARGV[2], 'state', 'retired', 'stock', '0', 'left', '0', 'sequence', sale[5],
  'generation', string.format('%d', sale[4] + 1), 'opens_at_ms', sale[6], 'closes_at_ms', sale[7], 'per_order_limit', sale[8],
  'payment_window_s', sale[9])
if sale[10] then redis.call('HSET', KEYS[1], 'shard', sale[10]) end
if sale[11] then redis.call('HSET', KEYS[1], 'items', sale[11], 'limit', sale[12]) end
return 'retired'
