-- The read side of the outbox: `crmctl outbox list`. {columns} stands for the block of that name.

-- name: columns
o.position,
       o.id as message_id,
       o.topic,
       o.aggregate_type,
       o.aggregate_id,
       case
           when o.published_at is not null then 'published'
           when o.next_attempt_at is not null then 'held'
           else 'pending'
       end as state,
       o.created_at,
       o.published_at,
       o.attempts,
       o.next_attempt_at,
       o.last_error

-- name: list_unpublished
-- In position order, from ix_outbox_messages_publishable and the index of held rows.
select {columns}
from (
    (
        select p.*
        from crm.outbox_messages p
        where p.published_at is null
            and p.next_attempt_at is null
            and not %(held)s::boolean
            and (%(topic)s::text is null or p.topic = %(topic)s::text)
            and (%(aggregate_id)s::text is null or p.aggregate_id = %(aggregate_id)s::text)
        order by p.position
        limit %(limit)s
    )
    union all
    (
        select h.*
        from crm.outbox_messages h
        where h.published_at is null
            and h.next_attempt_at is not null
            and (%(topic)s::text is null or h.topic = %(topic)s::text)
            and (%(aggregate_id)s::text is null or h.aggregate_id = %(aggregate_id)s::text)
        order by h.position
        limit %(limit)s
    )
) as o
order by o.position
limit %(limit)s

-- name: list_all
-- Published ones as well, the latest first. Reads the whole table unless an aggregate is named.
select {columns}
from crm.outbox_messages o
where (%(topic)s::text is null or o.topic = %(topic)s::text)
    and (%(aggregate_id)s::text is null or o.aggregate_id = %(aggregate_id)s::text)
order by o.position desc
limit %(limit)s
