#!lua flags=allow-oom
-- Opens a rebuilt shard of a sale in one step: the staged buyers replace the old ones, and the whole
-- shard is written with its new epoch. What was moved between shards counts from zero again.
--
-- Only the rebuild that closed the sale last can open it, in an epoch above the one that it was
-- closed in. A superseded rebuild or a duplicate call opens nothing.
--
-- KEYS
--   1  sale      hash, as in reserve.lua
--   2  buyers    hash, as in reserve.lua
--   3  staged    hash like buyers: those of the new epoch
--   4  sales     set of the ids of the sales in this partition
--   5  ended     hash, as in reserve.lua
--   6  over      hash like ended, staged beside it
-- ARGV
--   1  sale_id           as it goes into the set
--   2  epoch             the new one
--   3  holders           how many buyers must have been staged
--   4  revision          of the sale's definition
--   5  stock             units of the shard in all
--   6  left              unreserved units
--   7  sequence          that no place to be assigned is below
--   8  per_order_limit   units that one order may hold
--   9  opens_at_ms       0 for immediately
--   10  closes_at_ms      0 for never
--   11  payment_window_s  0 where a confirmed order is final
--   12  state             open, paused, ended or retired (retire.lua); and after a blank open_state, as in reserve.lua, if the sale has one
--   13  token             of the rebuild, as in close.lua
--   14  over              how many ended orders must have been staged
--   15  shard             as in reserve.lua; empty for a sale with one shard
--   16  items             as in open.lua
--   17  limit             as in open.lua
--   18  item_stock        units of the first item in the shard in all
--   19  item_left         unreserved units of the first item in the shard
--   20  item_limit        as in open.lua
--   and so on: three values for every further item
-- Answers
--   rebuilt         the sale is open in its new epoch
--   unchanged       it is open in this epoch already: a repeat
--   not-closed      the sale is not closed for this rebuild, or was closed in that epoch or a later one: nothing was done
--   wrong <number>  the number of staged buyers or ended orders: nothing was done

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'generation', 'rebuild', 'closed_epoch', 'quiet_since_ms')
if sale[1] == ARGV[2] then return 'unchanged' end
if sale[1] ~= '0' or sale[3] ~= ARGV[13] then return 'not-closed' end

for i = 2, #ARGV do
  if i ~= 12 and i ~= 13 and i ~= 15 and i ~= 16 and not string.find(ARGV[i], '^%d+$') then return redis.error_reply('ERR argument ' .. i .. ' must be a whole number') end
end
if ARGV[2] == '0' then return redis.error_reply('ERR epoch 0 is that of a closed sale') end
if tonumber(ARGV[2]) <= tonumber(sale[4]) then return 'not-closed' end
if tonumber(ARGV[6]) > tonumber(ARGV[5]) then return redis.error_reply('ERR more is left than is for sale') end
for i = 18, #ARGV, 3 do
  if tonumber(ARGV[i + 1]) > tonumber(ARGV[i]) then return redis.error_reply('ERR more is left than is for sale') end
end

local staged = redis.call('HLEN', KEYS[3])
if staged ~= tonumber(ARGV[3]) then return string.format('wrong %d', staged) end
local over = redis.call('HLEN', KEYS[6])
if over ~= tonumber(ARGV[14]) then return string.format('wrong %d', over) end
for _, command in ipairs({ { 'UNLINK', KEYS[1] }, { 'RENAME', KEYS[3], KEYS[2] }, { 'RENAME', KEYS[6], KEYS[5] }, { 'PERSIST', KEYS[2] },
  { 'SADD', KEYS[4], ARGV[1] }, { 'HSET', KEYS[1], 'epoch', ARGV[2] } }) do
  if not redis.acl_check_cmd(unpack(command)) then
    return redis.error_reply('NOPERM the sale stays closed: this user of Redis must be allowed ' .. command[1] .. ' of ' .. command[2])
  end
end

local state, open_state = string.match(ARGV[12], '^(%S*) ?(%S*)$')
-- A higher generation makes ingresses that remember the sale as sold out look again.
local generation = string.find(sale[2] or '', '^%d+$') and #sale[2] <= 15 and sale[2] or '0'
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[5])
if staged > 0 then
  redis.call('RENAME', KEYS[3], KEYS[2])
  redis.call('PERSIST', KEYS[2]) -- staged data expires unless it is used
end
if over > 0 then
  redis.call('RENAME', KEYS[6], KEYS[5])
  redis.call('PERSIST', KEYS[5])
  redis.call('HSET', KEYS[1], 'ended', '1')
end
if sale[5] and not ARGV[16] then redis.call('HSET', KEYS[1], 'quiet_since_ms', sale[5]) end
if ARGV[15] ~= '' then redis.call('HSET', KEYS[1], 'shard', ARGV[15]) end
redis.call('SADD', KEYS[4], ARGV[1])
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'revision', ARGV[4], 'stock', ARGV[5], 'left', ARGV[6], 'sequence', ARGV[7],
  'per_order_limit', ARGV[8], 'opens_at_ms', ARGV[9], 'closes_at_ms', ARGV[10], 'payment_window_s', ARGV[11],
  'state', state, 'generation', string.format('%d', generation + 1))
if open_state ~= '' then redis.call('HSET', KEYS[1], 'open_state', open_state) end
if ARGV[16] then
  local letters = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'
  redis.call('HSET', KEYS[1], 'items', ARGV[16], 'limit', ARGV[17])
  for i = 18, #ARGV, 3 do
    local place = (i - 15) / 3
    local letter = string.sub(letters, place, place)
    redis.call('HSET', KEYS[1], 'stock.' .. letter, ARGV[i], 'left.' .. letter, ARGV[i + 1])
    -- Each item by itself, so that units of another shard end the pause of their item (take.lua). It is not known
    -- whether somebody waits for what is left: it is offered until waitlist.lua.
    local since, offered = sale[5], open_state == 'waitlist' and ARGV[i + 1] ~= '0'
    if since or offered then redis.call('HSET', KEYS[1], 'quiet.' .. letter, (offered and 'offers ' or '') .. (since or '0')) end
    if ARGV[i + 2] ~= '0' then redis.call('HSET', KEYS[1], 'limit.' .. letter, ARGV[i + 2]) end
  end
end
return 'rebuilt'
