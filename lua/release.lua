#!lua flags=allow-oom
-- Gives units back to a sale: those of orders that came to nothing. A unit comes back once however
-- often this is asked, because the buyer's reservation goes with it and a reservation of another
-- order is left alone. What comes back is what the reservation says was taken.
--
-- Runs at maxmemory too: it only shrinks what is stored, and a sale must drain when memory is full.
--
-- KEYS
--   1  sale    hash, as in reserve.lua
--   2  buyers  hash, as in reserve.lua
-- ARGV
--   1  epoch     of the sale's stock, as the caller knows it
--   2  user      of the first order
--   3  order_id  of the first order, as in buyers
--   and so on: two values for every further order
-- Answers
--   {answer, answer, ...}, one for each order, in the order given
--   released      its units are for sale again, and its user may buy again
--   not-held      the user holds no reservation of this order: released before, or never made
--   damaged       more units would be left than are for sale, or what the user holds cannot be read: nothing was done
--   unknown-sale  there is no such sale
--   stale-epoch   the sale's stock was made anew since the caller last looked

local orders = (#ARGV - 1) / 2
if orders < 1 or orders ~= math.floor(orders) then
  return redis.error_reply('ERR release takes an epoch and two values for each order')
end

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'left', 'stock')
local refusal = not sale[1] and 'unknown-sale' or sale[1] ~= ARGV[1] and 'stale-epoch'

local answers, units = {}, 0
for i = 1, orders do
  local user, order_id = ARGV[2 * i], ARGV[2 * i + 1]
  local reservation = not refusal and redis.call('HGET', KEYS[2], user)
  local its_order, its_quantity = string.match(reservation or '', '^(%S+) (%d+) %d+ %x+%f[%z:@]:?[%w_-]*@?%d*%f[%z:@]$')
  if refusal then
    answers[i] = refusal
  elseif reservation and not its_order then
    answers[i] = 'damaged' -- whose units these are, nobody knows
  elseif its_order == order_id then
    if sale[2] + units + its_quantity > tonumber(sale[3]) then
      answers[i] = 'damaged'
    else
      redis.call('HDEL', KEYS[2], user)
      redis.call('HINCRBY', KEYS[1], 'left', its_quantity)
      units = units + its_quantity
      answers[i] = 'released'
    end
  else
    answers[i] = 'not-held'
  end
end
if units > 0 then redis.call('HINCRBY', KEYS[1], 'generation', 1) end
return answers
