-- Withdraws an offer whose entrant does not want it any more: it gives no unit from now on, also not by a call that is on its
-- way, unless it gave one before.
--
-- KEYS
--   1  sale    hash, as in reserve.lua
--   2  buyers  hash, as in reserve.lua
--   3  ended   hash, as in reserve.lua; a withdrawn offer has "- <quantity> w"
-- ARGV
--   1  user
--   2  key       fingerprint of its idempotency key
--   3  quantity  as in reserve.lua
-- Answers
--   made <order_id>  the offer gave its unit, and made this order, which may have ended
--   withdrawn        it gave none, and never will
--   unknown-sale     there is no such sale, or it is being rebuilt

local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch or epoch == '0' then return 'unknown-sale' end

local its_order, its_key = string.match(redis.call('HGET', KEYS[2], ARGV[1]) or '', '^(%S+) %w+ %d+ %x+:?([%w_-]*)')
if its_key == ARGV[2] then return 'made ' .. its_order end

local name = ARGV[2] .. ARGV[1]
local ended = redis.call('HGET', KEYS[3], name)
if ended then
  return string.sub(ended, -2) == ' w' and 'withdrawn' or 'made ' .. string.match(ended, '^%S+')
end
if not redis.acl_check_cmd('HSET', KEYS[3], name, 'w') then
  return redis.error_reply('NOPERM nothing was withdrawn: this user of Redis must be allowed HSET of ' .. KEYS[3])
end
redis.call('HSET', KEYS[1], 'ended', '1')
redis.call('HSET', KEYS[3], name, '- ' .. ARGV[3] .. ' w')
return 'withdrawn'
