-- name: deferred
-- What waits for its deal: how many events, the oldest, the next retry. By sequential scan: the table is small.
select count(*) as deferred_count,
       min(m.deferred_at) as oldest_deferred_at,
       min(m.next_attempt_at) as next_attempt_at
from crm.deferred_messages m
