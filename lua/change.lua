-- Makes a revision of a sale's definition: halts the sale, resumes it, ends it before its closing time, or gives it the
-- state that it has from now on while it is open. Revisions of which Redis has nothing are noted, so that later ones do
-- not wait for them.
--
-- Changes of a sale are applied in the order of their revisions, each exactly once: a repeat is
-- unchanged, and a change that comes too early is not applied before its predecessors.
--
-- The units of a sale are offered to entrants only, or are so when units return to a sale with a waiting list that has
-- none left, or are for everybody when a draw is over: that is its open_state.
--
-- KEYS
--   1  sale  hash, as in reserve.lua
-- ARGV
--   1  epoch       of the sale's stock that the caller expects
--   2  revision    that this change makes of the sale's definition
--   3  change      pause, resume, end, open or note
--   4  open_state  with open: as in reserve.lua
-- Answers
--   changed          the sale has this revision now
--   unchanged        the sale has this revision, or a later one
--   gap <revision>   the sale has this revision; those between are not applied yet
--   illegal <state>  a sale in this state cannot be changed so
--   unknown-sale     there is no such sale
--   stale-epoch      the sale's stock was rebuilt since the caller last looked

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'revision', 'state', 'generation', 'open_state')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] then return 'stale-epoch' end
if tonumber(ARGV[2]) <= tonumber(sale[2]) then return 'unchanged' end
if tonumber(ARGV[2]) > sale[2] + 1 then return 'gap ' .. sale[2] end

local change, state, open_state = ARGV[3], sale[3], sale[5] or 'open'
if change == 'note' then
  redis.call('HSET', KEYS[1], 'revision', ARGV[2])
  return 'changed'
end
local is_open = state == 'open' or state == 'waitlist' or state == 'offers'
local after = change == 'pause' and is_open and 'paused'
  or change == 'resume' and state == 'paused' and open_state
  or change == 'end' and state ~= 'ended' and 'ended'
  or change == 'open' and (state == open_state and ARGV[4] or state)
if not after then return 'illegal ' .. state end
local fields = { 'state', after, 'revision', ARGV[2], 'generation', string.format('%d', sale[4] + 1) }
if change == 'open' then fields[7], fields[8] = 'open_state', ARGV[4] end
redis.call('HSET', KEYS[1], unpack(fields))
return 'changed'
