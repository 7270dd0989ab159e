-- Gives a sale the state that it has from now on while it is open: its units are offered to entrants only, or are so when
-- units return to a sale with a waiting list that has none left, or are for everybody when a draw is over.
--
-- Changes of a sale are applied in the order of their revisions, each exactly once: a repeat is
-- unchanged, and a change that comes too early is not applied before its predecessors.
--
-- KEYS
--   1  sale  hash, as in reserve.lua
-- ARGV
--   1  epoch       of the sale's stock that the caller expects
--   2  revision    that this change makes of the sale's definition
--   3  open_state  as in reserve.lua
-- Answers
--   set                 the sale has this state, or will have it when it is resumed
--   unchanged           the sale has this revision, or a later one
--   gap <revision>      the sale has this revision; those between are not applied yet
--   unknown-sale        there is no such sale
--   stale-epoch         the sale's stock was rebuilt since the caller last looked

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'revision', 'state', 'generation', 'open_state')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] then return 'stale-epoch' end
if tonumber(ARGV[2]) <= tonumber(sale[2]) then return 'unchanged' end
if tonumber(ARGV[2]) > sale[2] + 1 then return 'gap ' .. sale[2] end

redis.call('HSET', KEYS[1], 'state', sale[3] == (sale[5] or 'open') and ARGV[3] or sale[3], 'open_state', ARGV[3], 'revision', ARGV[2],
  'generation', string.format('%d', sale[4] + 1))
return 'set'
