-- Decides many requests for one sale, in the order given, in one atomic step. All orders that it
-- accepts are in one entry of the stream before their buyers get the order ids.
--
-- A retried request gets the same answer and changes nothing, so a client, a proxy or go-redis may
-- send it any number of times. Retries are recognized by order id or idempotency key. That check
-- precedes all others, because a buyer with a reservation must learn of it even after the sale. A
-- request whose order has ended is recognized by its key and never makes another order.
--
-- Redis runs a script in isolation but does not roll it back. So everything is decided and the
-- rights to all writes are checked before the first write, which is the XADD: if it is refused (a
-- wrong type, an ACL, no memory, no ids left), nothing has happened.
--
-- An ingress remembers for up to 800 ms that a sale is sold out, with the buyers it had by then. So
-- units that return to a sale with none left are sold one second later. Otherwise one ingress could
-- answer "sold out" to a buyer who just got such a unit from another.
--
-- A sale may have several shards, each with its own keys and a share of the stock, which sell to
-- different users (give.lua, take.lua). For this script a shard is a sale; only its places are every
-- n-th ones of the sale, if there are n shards.
--
-- In the state offers the units are offered to entrants by rank, and only the worker that offers them takes units. In the
-- state waitlist the sale sells as in the state open, until units return when none are left: they are offered (release.lua).
-- A sale with items stays in the state waitlist, and offers each item by itself.
--
-- A sale may have items, and then an order has lines: its units of each item. An order gets all of its
-- lines or none. Every line is checked before the first one takes units.
--
-- KEYS
--   1  sale    hash: left stock state opens_at_ms closes_at_ms per_order_limit payment_window_s epoch
--              sequence generation revision; quiet_since_ms: when units returned to a sale with none
--              left; ended: 1 if the hash ended exists; open_state: what the sale has in the place of the state
--              open, if it is not that; shard: "<shard> <shards> <partitions>" if there
--              are several shards (reservation/keys.go), which have the fields of give.lua as well.
--              The next place is sequence + 1. In a sale with items: items, their codes in order, each
--              with a letter, a to z and then A to Z; left.a and stock.a, of which left and stock are the
--              sums; limit.a, if it has one; quiet.a: when units returned to an item with none left, after
--              "offers " if they are offered to those who wait; and limit in the place of per_order_limit,
--              which is 0 in no other sale: callers that do not know items sell nothing.
--   2  buyers  hash: user -> "<order id> <quantity> <sequence> <reserved_at_ms>", the last in hexadecimal,
--              followed by ":<key>" if the purchase had an idempotency key, and by "@<epoch>" if the
--              reservation was made before the last rebuild. Every order of the sale keeps this value,
--              so it is short: Redis rounds up to 44 characters, as most have, to 48 bytes, and 45 to 64.
--              In a sale with items, the lines of an order stand wherever others have its quantity, as
--              in a2c1: letters in their order, each with its units.
--   3  orders  stream of messages in the wire format of watermill-redisstream: one for all orders of
--              a call. Its payload has two lines for each order: the user, and its value in buyers
--   4  ended   hash: "<key><user>" -> "<order id> <quantity> <c, e, r or w>": the orders that were made with
--              an idempotency key and are cancelled, expired or rejected, and offers that are withdrawn
-- ARGV
--   1  epoch     of the sale's stock that the caller expects, followed by "+" if it offers the units
--   2  seen      the highest sequence that the caller has seen in this sale and epoch, or 0
--   3  metadata  of the message: a msgpack map of strings without its last value, the number of orders
--   4  user      of the first request
--   5  order_id  that the request gets if it wins, as it goes into buyers; the same in a repeat
--   6  key       fingerprint of its idempotency key without spaces, or "-" for none
--   7  quantity  decimal, at least 1; or lines
--   and so on: four values for every further request
-- Answers
--   {now_ms, left, generation, answer, answer, ...}, one answer for each request, in order; left and
--   generation are those of the sale after this call, or -1 if they are unknown. If items are sold out,
--   left is what is left of each item, as in a0b7.
--   reserved <sequence>         the units are taken, at now_ms
--   replayed <reservation>      the same request again; the reservation is written as in buyers
--   order-ended <ended>         the request made this order, which has ended; it is written as in ended
--   withdrawn                   the request is an offer that its entrant does not want any more (withdraw.lua)
--   key-reused                  the same idempotency key, but another quantity or other lines
--   already-purchased <reservation>  the user holds this reservation
--   paused                      by an operator
--   offers-only                 the units are offered, and the caller is not the one that offers them; followed by the
--                               items of which this is so and what is left of each, if it is not so of all
--   retired                     it has ended, and its buyers are only in Postgres (retire.lua)
--   ended                       by an operator, or its closing time has passed
--   not-open <opens_at_ms>      before its opening time
--   over-limit <limit>          more units than one order may hold; the limit of an item with its letter, as in a2
--   sold-out                    fewer units are left than requested, or they returned less than a second ago; followed
--                               by the items of which this is so and what is left of each, as in a0c1
--   wrong-items                 lines in a sale without items, or a quantity or a letter without an item in one with items,
--                               or the fields of such an item cannot be read
--   damaged                     the data of this user cannot be read: nothing was done for this request
--   unknown-sale                there is no such sale
--   stale-epoch                 the sale's stock was rebuilt since the caller last looked, or is being rebuilt
--   rewound                     the sale's sequence is below what the caller has seen: Redis lost orders

-- This is the hot path: lookups are local, and no number of a request is converted to text twice.
local ARGV = ARGV
local per_request, before = 4, 3
local requests = (#ARGV - before) / per_request
if requests < 1 or requests ~= math.floor(requests) then
  return redis.error_reply('ERR reserve takes an epoch, a sequence, metadata and four values for each request')
end

local terms = redis.call('HMGET', KEYS[1], 'epoch', 'left', 'sequence', 'generation', 'state', 'opens_at_ms', 'closes_at_ms', 'per_order_limit',
  'quiet_since_ms', 'ended', 'shard')
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function all_answered(word)
  local answers = { now_ms, -1, -1 }
  for i = 1, requests do answers[3 + i] = word end
  return answers
end

if not terms[1] then return all_answered('unknown-sale') end
-- Epoch 0 is that of a closed sale (close.lua).
local offering = false
if terms[1] ~= ARGV[1] or ARGV[1] == '0' then
  if terms[1] .. '+' ~= ARGV[1] or terms[1] == '0' then return all_answered('stale-epoch') end
  offering = true
end

-- tonumber also accepts "nan", "0x10", "1e2" and " 5 ".
local function whole(text)
  return text and #text <= 15 and string.find(text, '^%d+$') and tonumber(text)
end

-- Most requests ask for the same few quantities.
local quantities = {}
local function quantity_of(text)
  local quantity = quantities[text]
  if not quantity then
    quantity = whole(text)
    quantities[text] = quantity
  end
  return quantity
end

local left, sequence, generation = whole(terms[2]), whole(terms[3]), whole(terms[4])
local seen = whole(ARGV[2])
local state, opens_at_ms, closes_at_ms, limit = terms[5], whole(terms[6]), whole(terms[7]), whole(terms[8])
if not (left and sequence and generation and state and opens_at_ms and closes_at_ms and limit) then
  return redis.error_reply('ERR the sale ' .. KEYS[1] .. ' is damaged: a field is missing or is not a whole number')
end
if not seen then return redis.error_reply('ERR the sequence that was seen must be a whole number') end
if sequence < seen then return all_answered('rewound') end

-- The answer to every request of a user without a reservation, if it is the same for all.
local closed
if state == 'retired' then
  closed = 'retired'
elseif state == 'ended' or (closes_at_ms > 0 and now_ms >= closes_at_ms) then
  closed = 'ended'
elseif state == 'paused' then
  closed = 'paused'
elseif state == 'offers' and not offering then
  closed = 'offers-only'
elseif state ~= 'open' and state ~= 'waitlist' and state ~= 'offers' then
  return redis.error_reply('ERR the sale ' .. KEYS[1] .. ' is damaged: its state is ' .. state)
elseif now_ms < opens_at_ms then
  closed = 'not-open ' .. terms[6]
end

local step = terms[11] and whole(string.match(terms[11], '^%d+ (%d+) %d+$')) or 1 -- from one place to the next

local quiet_ms = 1000 -- longer than an ingress remembers, as its clock may be slow
if state == 'offers' then quiet_ms = 0 end -- nobody else can buy the units
local quiet_since, quiet = whole(terms[9]), false
if quiet_since then
  quiet = now_ms - quiet_since < quiet_ms
  -- The clock was set back by an unknown time, so the pause begins now.
  if now_ms < quiet_since then redis.call('HSET', KEYS[1], 'quiet_since_ms', string.format('%d', now_ms)) end
end

-- A value of buyers, and of ended. The frontiers (%f) ensure that a mark follows the time and that none is the last character.
local held_pattern = '^(%S+) (%d+) %d+ %x+%f[%z:@]:?([%w_-]*)@?%d*%f[%z:@]$'
local ended_pattern = '^%S+ (%d+) %l$'
local wrong = math.huge -- the quantity of a request that the sale cannot have, such as lines if it has no items

-- A sale without items pays nothing for them: it makes no closure, and its orders have one test more.
local items, codes, letters, lines_of, shortage_of
local plans -- what lines take, by their text: an item and its units, and so on; or why nobody can have them
local some_short = false
if limit == 0 then
  held_pattern, ended_pattern = string.gsub(held_pattern, '%%d', '%%w', 1), string.gsub(ended_pattern, '%%d', '%%w', 1)
  letters = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'
  lines_of = function(text)
    local lines, sum, last, size = {}, 0, 0, 0
    for letter, units in string.gmatch(text, '(%a)([1-9]%d*)') do
      local place = string.find(letters, letter, 1, true) or 0
      if place <= last or #units > 7 then return nil end
      lines[#lines + 1], sum, last, size = { letter = letter, units = tonumber(units) }, sum + units, place, size + 1 + #units
    end
    if size > 0 and size == #text then return lines, sum end
  end

  items, plans = {}, {} -- items that are asked for, by letter
  local fields = { 'items', 'limit' }
  for i = 1, requests do
    local text = ARGV[before + i * per_request]
    if not quantities[text] then
      local lines, units = lines_of(text)
      local plan = {}
      plans[text], quantities[text] = plan, units or wrong
      for _, line in ipairs(lines or {}) do
        local item = items[line.letter]
        if not item then
          item = { at = #fields, letter = line.letter }
          items[line.letter] = item
          for _, field in ipairs({ 'left.', 'limit.', 'quiet.' }) do fields[#fields + 1] = field .. line.letter end
        end
        plan[#plan + 1], plan[#plan + 2] = item, line.units
      end
    end
  end
  local values = redis.call('HMGET', KEYS[1], unpack(fields))
  codes, limit, terms[8] = values[1], whole(values[2]), values[2]
  if not (codes and limit) then
    return redis.error_reply('ERR the sale ' .. KEYS[1] .. ' is damaged: per_order_limit is 0, but items or limit is missing')
  end
  for letter, item in pairs(items) do
    local mark = values[item.at + 3]
    local since = whole(mark)
    item.is_offered = mark and not offering and string.sub(mark, 1, 6) == 'offers'
    item.left, item.limit = whole(values[item.at + 1]), whole(values[item.at + 2] or values[2])
    -- What may be taken of it. Nothing is taken of an item whose units have just returned.
    item.free = not quiet and not (since and now_ms - since < quiet_ms) and item.left or 0
    if since and now_ms < since then redis.call('HSET', KEYS[1], 'quiet.' .. letter, string.format('%d', now_ms)) end
  end

  for text, plan in pairs(plans) do
    local offered = ''
    for j = 1, #plan, 2 do
      local item, units = plan[j], plan[j + 1]
      if not (item.left and item.limit) then
        plans[text] = 'wrong-items'
      elseif units > item.limit then
        plans[text] = 'over-limit ' .. item.letter .. string.format('%d', item.limit)
      end
      if plans[text] ~= plan then break end
      if item.is_offered then offered = offered .. item.letter .. string.format('%d', item.left) end
    end
    if plans[text] == plan and offered ~= '' then plans[text] = 'offers-only ' .. offered end
  end

  shortage_of = function(plan)
    some_short = true
    local answer = 'sold-out '
    for j = 1, #plan, 2 do
      local item = plan[j]
      if plan[j + 1] > item.free then answer = answer .. item.letter .. string.format('%d', item.left) end
    end
    return answer
  end
end

local users = {}
for i = 1, requests do users[i] = ARGV[before + 1 + (i - 1) * per_request] end
local held = redis.call('HMGET', KEYS[2], unpack(users))
local ended = {}
if terms[10] then
  local names = {}
  for i = 1, requests do
    local key = ARGV[before + 3 + (i - 1) * per_request]
    names[i] = key == '-' and '' or key .. users[i] -- no order has the empty name, and "-" begins some
  end
  ended = redis.call('HMGET', KEYS[4], unpack(names))
end

local answers = { now_ms, left, generation }
local ending = string.format(' %x', now_ms)
-- reservations are users and what each of them holds, in turns.
local winners, first_order, reservations, winner_of = 0, nil, {}, {}

for i = 1, requests do
  local at = before + (i - 1) * per_request
  local user, order_id, key = users[i], ARGV[at + 2], ARGV[at + 3]
  local text = ARGV[at + 4]
  local quantity = quantity_of(text)
  if not quantity or quantity < 1 then
    if not string.find(text, '^%a%d%w*$') then
      return redis.error_reply('ERR quantity must be a whole number of at least 1')
    end
    quantity = wrong
  end

  local reservation = held[i] or winner_of[user]
  local answer
  if reservation then
    local its_order, units, its_key = string.match(reservation, held_pattern)
    if not its_order or items and not lines_of(units) then
      answer = 'damaged'
    elseif its_order == order_id then
      answer = 'replayed ' .. reservation
    elseif key ~= '-' and key == its_key then
      answer = (units == text or tonumber(units) == quantity) and 'replayed ' .. reservation or 'key-reused'
    elseif not ended[i] then
      answer = 'already-purchased ' .. reservation
    end
  end
  if answer then -- by what the user holds
  elseif ended[i] then
    local units = string.match(ended[i], ended_pattern)
    if not units or items and not lines_of(units) then
      answer = 'damaged'
    elseif string.sub(ended[i], -1) == 'w' then
      answer = 'withdrawn'
    else
      answer = (units == text or tonumber(units) == quantity) and 'order-ended ' .. ended[i] or 'key-reused'
    end
  elseif closed then
    answer = closed
  elseif quantity > limit then
    answer = quantity == wrong and 'wrong-items' or 'over-limit ' .. terms[8]
  elseif items then
    local plan = plans[text]
    if type(plan) == 'string' then
      answer = plan
    else
      for j = 1, #plan, 2 do
        if plan[j + 1] > plan[j].free then answer = shortage_of(plan) break end
      end
      if not answer then
        for j = 1, #plan, 2 do
          local item, units = plan[j], plan[j + 1]
          item.free, item.left = item.free - units, item.left - units
        end
      end
    end
  elseif quantity > left or quiet then
    answer = 'sold-out'
  end
  if not answer then
    left = left - quantity
    local place = string.format('%d', sequence + 1)
    sequence = sequence + step
    winners = winners + 1
    first_order = first_order or order_id
    answer = 'reserved ' .. place
    reservation = order_id .. ' ' .. text .. ' ' .. place .. (key == '-' and ending or ending .. ':' .. key)
    winner_of[user] = reservation
    reservations[2 * winners - 1], reservations[2 * winners] = user, reservation
  end
  answers[3 + i] = answer
end

answers[2] = left
if some_short then
  local names, lefts = {}, {}
  for _ in string.gmatch(codes, '%S+') do names[#names + 1] = 'left.' .. string.sub(letters, #names + 1, #names + 1) end
  for i, its_left in ipairs(redis.call('HMGET', KEYS[1], unpack(names))) do
    local letter = string.sub(names[i], -1)
    lefts[i] = letter .. string.format('%d', items[letter] and items[letter].left or whole(its_left) or 0)
  end
  answers[2] = table.concat(lefts)
end
if winners == 0 then return answers end

-- An event without its reservation would be an order that is hidden from its buyer. Rights
-- may change at any time, and checking them is cheap. XADD checks its own.
if not (redis.acl_check_cmd('HSET', KEYS[1], 'left', '0') and redis.acl_check_cmd('HSET', KEYS[2], 'user', 'held')) then
  return redis.error_reply('NOPERM nothing was reserved: this user of Redis must be allowed HSET of ' .. KEYS[1] .. ' and ' .. KEYS[2])
end

local count = string.format('%d', winners)
redis.call('XADD', KEYS[3], '*', '_watermill_message_uuid', first_order,
  'metadata', ARGV[3] .. string.char(0xa0 + #count) .. count, 'payload', table.concat(reservations, '\n'))
redis.call('HSET', KEYS[1], 'left', string.format('%d', left), 'sequence', string.format('%d', sequence))
if items then
  local lefts = {}
  for letter, item in pairs(items) do
    if item.left then lefts[#lefts + 1], lefts[#lefts + 2] = 'left.' .. letter, string.format('%d', item.left) end
  end
  redis.call('HSET', KEYS[1], unpack(lefts))
end
redis.call('HSET', KEYS[2], unpack(reservations))
return answers
