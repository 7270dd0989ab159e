#!lua flags=allow-oom
-- Returns the units of cancelled, expired and rejected orders to a sale. Repeats return nothing,
-- because the same step deletes the buyer's reservation, and a reservation of another order stays.
-- The reservation says how many units return, and to which items.
--
-- The same step adds the reservation's idempotency key to the ended orders, so that a retry of the
-- request makes no new order. It does so for an order that is not held, too: Redis may have lost it.
--
-- Runs at maxmemory too, because a sale must drain when memory is full: it writes no more than it
-- deletes, except for orders that Redis has lost.
--
-- Units that return to a sale, or to an item, with none left and with a waiting list are offered to those who wait.
--
-- KEYS
--   1  sale    hash, as in reserve.lua
--   2  buyers  hash, as in reserve.lua
--   3  ended   hash, as in reserve.lua
-- ARGV
--   1  epoch     of the sale's stock that the caller expects
--   2  user      of the first order
--   3  order_id  of the first order, as in buyers
--   4  key       of the first order, as in reserve.lua; the key of its reservation takes precedence
--   5  ending    of the first order, as in ended after the id: "<quantity> <c, e or r>"; or "-" for an
--                order whose key is not recorded
--   and so on: four values for every further order
-- Answers
--   {answer, answer, ...}, one for each order, in the order given
--   released      its units are for sale again, and its user may buy again
--   not-held      the user holds no reservation of this order: released before, never made, or the sale is
--                 retired (retire.lua): it sells nothing more, and nothing is written
--   damaged       more units would be left than are for sale, or what the user holds cannot be read: nothing was done
--   unknown-sale  there is no such sale
--   stale-epoch   the sale's stock was rebuilt since the caller last looked

local per_order = 4
local orders = (#ARGV - 1) / per_order
if orders < 1 or orders ~= math.floor(orders) then
  return redis.error_reply('ERR release takes an epoch and four values for each order')
end

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'left', 'stock', 'generation', 'ended', 'state', 'items', 'open_state')
local refusal = not sale[1] and 'unknown-sale' or sale[1] ~= ARGV[1] and 'stale-epoch' or sale[6] == 'retired' and 'not-held'
-- Check all rights first: a partial release would lose a unit or return it twice.
if not (redis.acl_check_cmd('HDEL', KEYS[2], 'user') and redis.acl_check_cmd('HSET', KEYS[1], 'left', '0')
    and redis.acl_check_cmd('HSET', KEYS[3], 'key', 'order')) then
  return redis.error_reply('NOPERM nothing was released: this user of Redis must be allowed HDEL of ' .. KEYS[2] ..
    ', and HSET of ' .. KEYS[1] .. ' and ' .. KEYS[3])
end

redis.call('HLEN', KEYS[3]) -- a key of another type refuses the whole call
local generation = refusal and 0 or sale[4] + 1

local held_pattern = '^(%S+) (%d+) %d+ %x+%f[%z:@]:?([%w_-]*)@?%d*%f[%z:@]$' -- as in reserve.lua

-- A sale without items makes no closure.
local items, lines_of, put_back
if sale[7] and not refusal then
  held_pattern = string.gsub(held_pattern, '%%d', '%%w', 1)
  local letters = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'
  lines_of = function(text)
    local lines, sum, last, size = {}, 0, 0, 0
    for letter, units in string.gmatch(text, '(%a)([1-9]%d*)') do
      local place = string.find(letters, letter, 1, true) or 0
      if place <= last or #units > 7 then return nil end
      lines[#lines + 1], sum, last, size = { letter = letter, units = tonumber(units) }, sum + units, place, size + 1 + #units
    end
    if size > 0 and size == #text then return lines, sum end
  end

  -- What is left and for sale of each item, and what returns to it, by letter.
  items = setmetatable({}, { __index = function(known, letter)
    local item = redis.call('HMGET', KEYS[1], 'left.' .. letter, 'stock.' .. letter)
    known[letter] = { left = tonumber(item[1]), stock = tonumber(item[2]), returned = 0 }
    return known[letter]
  end })

  -- put_back is true if the units of all lines return, and false if those of one cannot.
  put_back = function(lines)
    for _, line in ipairs(lines) do
      local item = items[line.letter]
      if not (item.left and item.stock) or item.left + item.returned + line.units > item.stock then return false end
    end
    for _, line in ipairs(lines) do items[line.letter].returned = items[line.letter].returned + line.units end
    return true
  end
end

local answers, units, released, remembered = {}, 0, false, false
for i = 1, orders do
  local at = (i - 1) * per_order + 1
  local user, order_id, key, ending = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local reservation = not refusal and redis.call('HGET', KEYS[2], user)
  local its_order, its_quantity, its_key = string.match(reservation or '', held_pattern)
  local lines
  if items and its_order then lines, its_quantity = lines_of(its_quantity) end
  if refusal then
    answers[i] = refusal
  elseif reservation and not its_quantity then
    answers[i] = 'damaged' -- it is unknown whose units these are
  elseif its_order == order_id then
    if sale[2] + units + its_quantity > tonumber(sale[3]) or items and not put_back(lines) then
      answers[i] = 'damaged'
    else
      redis.call('HDEL', KEYS[2], user)
      units, released = units + its_quantity, true
      if its_key ~= '' then key = its_key end
      answers[i] = 'released'
    end
  else
    answers[i] = 'not-held'
  end
  if not refusal and (answers[i] == 'released' or answers[i] == 'not-held') and key ~= '-' and ending ~= '-' then
    redis.call('HSET', KEYS[3], key .. user, order_id .. ' ' .. ending)
    remembered = true
  end
end
if released then
  redis.call('HSET', KEYS[1], 'left', string.format('%d', sale[2] + units), 'generation', string.format('%d', generation))
  if items then
    local time = redis.call('TIME')
    local mark = (sale[8] == 'waitlist' and 'offers ' or '') .. string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
    for letter, item in pairs(items) do
      if item.returned > 0 then
        redis.call('HSET', KEYS[1], 'left.' .. letter, string.format('%d', item.left + item.returned))
        if item.left == 0 then redis.call('HSET', KEYS[1], 'quiet.' .. letter, mark) end
      end
    end
  elseif tonumber(sale[2]) == 0 then
    local time = redis.call('TIME')
    redis.call('HSET', KEYS[1], 'quiet_since_ms', string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000)))
    if sale[8] == 'waitlist' then
      redis.call('HSET', KEYS[1], 'open_state', 'offers', 'state', sale[6] == 'waitlist' and 'offers' or sale[6])
    end
  end
end
if remembered and not sale[5] then redis.call('HSET', KEYS[1], 'ended', '1') end
return answers
