-- Applies a revision of a sale's definition that changes nothing in Redis, so that later changes do
-- not wait for it.
--
-- KEYS
--   1  sale  hash, as in reserve.lua
-- ARGV
--   1  epoch     of the sale's stock that the caller expects
--   2  revision  of the sale's definition
-- Answers
--   noted           the sale has this revision now
--   unchanged       the sale has this revision, or a later one
--   gap <revision>  the sale has this revision; those between are not applied yet
--   unknown-sale    there is no such sale
--   stale-epoch     the sale's stock was rebuilt since the caller last looked

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'revision')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] then return 'stale-epoch' end
if tonumber(ARGV[2]) <= tonumber(sale[2]) then return 'unchanged' end
if tonumber(ARGV[2]) > sale[2] + 1 then return 'gap ' .. sale[2] end
redis.call('HSET', KEYS[1], 'revision', ARGV[2])
return 'noted'
