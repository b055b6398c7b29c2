-- The read side of the installations: `crmctl installations list` and `show`. No token is ever selected. {row} stands
-- for the block of that name, the other names as in sweep_installations.sql.

-- name: row
i.id as installation_id,
       i.status,
       a.status as account_status,
       i.bitrix_24_account_id as account_id,
       a.member_id,
       a.domain_url,
       i.created_at_utc at time zone %(zone)s as created_at,
       extract(epoch from now() - (i.created_at_utc at time zone %(zone)s))::bigint as age_seconds,
       i.status = 'new' and i.created_at_utc at time zone %(zone)s <= now() - %(ttl)s::interval as stale,
       c.verdict,
       c.reason,
       c.attempts,
       c.last_checked_at,
       c.next_check_at

-- name: list
-- Those that are not deleted, the oldest first; with `stale` only what the sweep would look at.
select {row}
from {installations} i
left join {accounts} a on a.id = i.bitrix_24_account_id
left join crm.installation_checks c on c.installation_id = i.id
where i.status <> 'deleted'
    and (
        not %(stale)s
        or (i.status = 'new' and i.created_at_utc at time zone %(zone)s <= now() - %(ttl)s::interval)
    )
order by i.created_at_utc, i.id
limit %(limit)s

-- name: figures
-- How many wait for their finish step beyond the TTL, and what the sweep last found of those that wait.
select count(*) filter (where i.created_at_utc at time zone %(zone)s <= now() - %(ttl)s::interval) as stale_count,
       count(*) filter (where c.verdict = 'unclear') as unclear_count,
       count(*) filter (where c.verdict = 'anomaly') as anomaly_count
from {installations} i
left join crm.installation_checks c on c.installation_id = i.id
where i.status = 'new'

-- name: show
-- One installation with its account. By primary keys.
select {row},
       i.update_at_utc at time zone %(zone)s as updated_at,
       i.comment,
       i.external_id,
       i.portal_license_family,
       coalesce(i.application_token, '') <> '' as has_application_token,
       a.updated_at_utc at time zone %(zone)s as account_updated_at,
       a.comment as account_comment,
       a.is_master_account,
       coalesce(a.application_token, '') <> '' as account_has_application_token,
       to_timestamp(a.{expires}) as access_token_expires_at,
       c.outcome,
       c.run_id,
       c.ttl_seconds as checked_with_ttl_seconds,
       c.age_seconds as checked_at_age_seconds,
       c.overridden_at,
       case when c.claimed_until > now() then c.claimed_until end as claimed_until
from {installations} i
left join {accounts} a on a.id = i.bitrix_24_account_id
left join crm.installation_checks c on c.installation_id = i.id
where i.id = %(installation_id)s

-- name: journal
-- The sweep's own journal rows about it, in the order of their writing.
select j.created_at_utc at time zone %(zone)s as created_at, j.level, j.label, j.message, j.context_payload as context
from {journal} j
where j.application_installation_id = %(installation_id)s
    and j.label = any(%(labels)s)
order by j.created_at_utc, j.id

-- name: events
-- Its events. By ix_outbox_messages_aggregate.
select o.id as message_id, o.topic, o.created_at, o.published_at, o.payload
from crm.outbox_messages o
where o.aggregate_id = %(installation_id)s::text
    and o.aggregate_type = %(aggregate_type)s
order by o.position
