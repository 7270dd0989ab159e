-- Says whom the units of a sale with a waiting list are for: everybody, until units return when none are left, or for good
-- if the list is closed; or those who wait.
--
-- Units are for everybody again when nobody waits for them. The caller knows that.
--
-- A shard with none left offers what it gets from others before it gets it (give.lua), or its users could buy it.
--
-- KEYS
--   1  sale  hash, as in reserve.lua
-- ARGV
--   1  epoch       of the sale's stock that the caller expects
--   2  open_state  waitlist, open if the list is closed, or offers
--   3  letters     of the items for which nobody waits; with offers, of those that are offered from now on if none are left;
--                  empty in a sale without items
-- Answers
--   changed       the sale has this open state, or some of these items were offered and are not any more, or are offered now
--   unchanged     it was so before, or the shard has units for everybody and cannot offer others
--   unknown-sale  there is no such sale
--   stale-epoch   the sale's stock was rebuilt since the caller last looked, or is being rebuilt

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'open_state', 'left', 'generation')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] or ARGV[1] == '0' then return 'stale-epoch' end

local changes = {}
local open_state, offers_items = sale[3], ARGV[2] == 'offers' and ARGV[3] ~= ''
for letter in string.gmatch(ARGV[3], '%a') do
  local item = redis.call('HMGET', KEYS[1], 'quiet.' .. letter, 'left.' .. letter)
  local since = string.match(item[1] or '', '^offers (%d+)$')
  if offers_items and not since and item[2] == '0' and open_state == 'waitlist' then
    local time = redis.call('TIME')
    local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
    changes[#changes + 1], changes[#changes + 2] = 'quiet.' .. letter, 'offers ' .. now
  elseif since and not offers_items then
    changes[#changes + 1], changes[#changes + 2] = 'quiet.' .. letter, since
  end
end
local may_change = not offers_items and (ARGV[2] == 'open' or open_state == 'offers' or open_state == 'waitlist' and sale[4] == '0')
if open_state ~= ARGV[2] and may_change then
  changes[#changes + 1], changes[#changes + 2] = 'open_state', ARGV[2]
  if sale[2] == open_state then changes[#changes + 1], changes[#changes + 2] = 'state', ARGV[2] end
  if ARGV[2] == 'offers' then -- if they are for everybody soon: ingresses may remember the sale as sold out (reserve.lua)
    local time = redis.call('TIME')
    changes[#changes + 1], changes[#changes + 2] = 'quiet_since_ms', string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
  end
end
if #changes == 0 then return 'unchanged' end
redis.call('HSET', KEYS[1], 'generation', string.format('%d', sale[5] + 1), unpack(changes))
return 'changed'
