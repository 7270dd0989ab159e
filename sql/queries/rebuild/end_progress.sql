-- Removes the progress of a rebuild that has ended. $1 its id
DELETE FROM rebuilds WHERE id = $1
