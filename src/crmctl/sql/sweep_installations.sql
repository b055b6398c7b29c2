-- `crmctl installations sweep`. {installations}, {accounts}, {journal} and the token's columns stand for the names
-- of bitrix24-php-lib's tables and columns in this database (adapters/bitrix24_tables.py); {due} and {elsewhere} for
-- the blocks of these names. The library's `_utc` columns hold PHP's default time zone, %(zone)s. It has no index on
-- the status: the queue is a scan of the installations.

-- name: due
-- Which installations a run may take: new, older than the TTL, not claimed by another run, and their next look is
-- due. Named ones are always due; `impatient` takes all but anomalies before their time.
i.status = 'new'
    and i.created_at_utc at time zone %(zone)s <= now() - %(ttl)s::interval
    and (%(ids)s::uuid[] is null or i.id = any(%(ids)s::uuid[]))
    and i.id <> all(%(passed)s::uuid[])
    and (c.claimed_until is null or c.claimed_until <= now())
    and (
        %(ids)s::uuid[] is not null
        or c.next_check_at is null
        or c.next_check_at <= now()
        or (%(impatient)s and c.verdict <> 'anomaly')
    )

-- name: select_due
-- The queue of a run that asks no portal: what was never looked at first, then by next_check_at.
select i.id as installation_id
from {installations} i
left join crm.installation_checks c on c.installation_id = i.id
where {due}
order by c.next_check_at nulls first, i.created_at_utc, i.id
limit %(limit)s

-- name: take_turn
-- Claims are made one after the other, so that each sees the leases of the one before.
select pg_advisory_xact_lock(%(lock)s)

-- name: elsewhere
-- Portals that other runs are asking now, and those that they asked within the last second. The second is a scan of
-- the checks, as the queue is one of the installations.
busy as materialized (
    select lower(btrim(a.domain_url)) as domain
    from crm.installation_checks c
    join {installations} i on i.id = c.installation_id
    join {accounts} a on a.id = i.bitrix_24_account_id
    where c.claimed_by is not null
        and c.claimed_until > now()
),
recent as materialized (
    select lower(btrim(a.domain_url)) as domain
    from crm.installation_checks c
    join {installations} i on i.id = c.installation_id
    join {accounts} a on a.id = i.bitrix_24_account_id
    where c.last_checked_at > now() - interval '1 second'
        and c.run_id <> %(run_id)s
)

-- name: claim
-- The same queue for a run that asks portals: locks the rows, passes by those that others hold, and leaves a lease
-- that other runs respect. Portals that another run is asking now are passed by as well: two runs would ask them
-- twice as fast. A token is at risk where a run died that had claimed it, unless it was known to be invalid before.
with {elsewhere},
candidate as materialized (
    select i.id, c.claimed_until is not null as died_before
    from {installations} i
    left join {accounts} a on a.id = i.bitrix_24_account_id
    left join crm.installation_checks c on c.installation_id = i.id
    where {due}
        and lower(btrim(coalesce(a.domain_url, ''))) not in (select b.domain from busy b)
    order by c.next_check_at nulls first, i.created_at_utc, i.id
    limit %(limit)s
    for no key update of i skip locked
),
claimed as (
    insert into crm.installation_checks as c (installation_id, claimed_until, claimed_by)
    select k.id, now() + %(lease)s::interval, %(run_id)s
    from candidate k
    on conflict (installation_id) do update
    set claimed_until = excluded.claimed_until,
        claimed_by = excluded.claimed_by
    where c.claimed_until is null or c.claimed_until <= now()
    returning c.installation_id, c.reason
)
select i.id as installation_id,
       d.reason is not distinct from 'TOKEN_LOST'
           or (k.died_before and d.reason is distinct from 'TOKEN_INVALID') as token_at_risk,
       lower(btrim(coalesce(a.domain_url, ''))) in (select r.domain from recent r) as asked_lately,
       a.id as account_id,
       a.member_id,
       a.domain_url,
       coalesce(a.{access_token}, '') as access_token,
       coalesce(a.{refresh_token}, '') as refresh_token,
       coalesce(a.{expires}, 0) as expires
from claimed d
join candidate k on k.id = d.installation_id
join {installations} i on i.id = d.installation_id
left join {accounts} a on a.id = i.bitrix_24_account_id
order by i.created_at_utc, i.id

-- name: look
-- What a dry run asks by: the same queue and columns, and nothing written.
with {elsewhere}
select i.id as installation_id,
       false as token_at_risk,
       lower(btrim(coalesce(a.domain_url, ''))) in (select r.domain from recent r) as asked_lately,
       a.id as account_id,
       a.member_id,
       a.domain_url,
       coalesce(a.{access_token}, '') as access_token,
       coalesce(a.{refresh_token}, '') as refresh_token,
       coalesce(a.{expires}, 0) as expires
from {installations} i
left join crm.installation_checks c on c.installation_id = i.id
left join {accounts} a on a.id = i.bitrix_24_account_id
where {due}
    and lower(btrim(coalesce(a.domain_url, ''))) not in (select b.domain from busy b)
order by c.next_check_at nulls first, i.created_at_utc, i.id
limit %(limit)s

-- name: store_token
-- The compare-and-set of a renewed token. As the library's own renewal does, it leaves expires_in empty.
update {accounts} a
set {access_token} = %(access_token)s,
    {refresh_token} = %(refresh_token)s,
    {expires} = coalesce(%(expires)s::bigint, extract(epoch from now())::bigint + %(expires_in)s::bigint),
    {expires_in} = null,
    updated_at_utc = now() at time zone %(zone)s
where a.id = %(account_id)s
    and a.{refresh_token} = %(old_refresh_token)s
returning a.id

-- name: same_token
-- Whether a token that could not be replaced is still the stored one: if so, a trigger kept it. By primary key.
select a.id
from {accounts} a
where a.id = %(account_id)s
    and a.{refresh_token} = %(old_refresh_token)s

-- name: lock_installations
-- The installations of a batch, in id order; those that another session holds are passed by.
select i.id as installation_id, i.bitrix_24_account_id as account_id
from {installations} i
where i.id = any(%(ids)s::uuid[])
order by i.id
for no key update skip locked

-- name: lock_accounts
-- Their accounts, the same way.
select a.id as account_id
from {accounts} a
where a.id = any(%(ids)s::uuid[])
order by a.id
for no key update skip locked

-- name: read_pairs
-- The pairs as they are now. Run after the locks, it sees what was committed while they were waited for, also in the
-- rows that a lock does not cover: the member's other installations and accounts.
with pair as materialized (
    select i.id as installation_id,
           i.bitrix_24_account_id as account_id,
           i.status as installation_status,
           a.id is not null as has_account,
           a.status as account_status,
           a.member_id,
           a.is_master_account as is_master,
           coalesce(i.application_token, '') <> '' or coalesce(a.application_token, '') <> '' as token_set,
           extract(epoch from now() - (i.created_at_utc at time zone %(zone)s))::float8 as age_seconds
    from {installations} i
    left join {accounts} a on a.id = i.bitrix_24_account_id
    where i.id = any(%(ids)s::uuid[])
),
installation as (
    select a.member_id, count(*) as live
    from {accounts} a
    join {installations} i on i.bitrix_24_account_id = a.id
    where i.status <> 'deleted'
        and a.member_id in (select p.member_id from pair p)
    group by a.member_id
),
master as (
    select a.member_id, count(*) as live
    from {accounts} a
    where a.is_master_account
        and a.status in ('new', 'active')
        and a.member_id in (select p.member_id from pair p)
    group by a.member_id
)
select p.*,
       coalesce(n.live, 0) as live_installations,
       coalesce(m.live, 0) as live_masters,
       c.verdict as last_verdict,
       coalesce(c.attempts, 0) as last_attempts,
       c.claimed_by
from pair p
left join installation n on n.member_id = p.member_id
left join master m on m.member_id = p.member_id
left join crm.installation_checks c on c.installation_id = p.installation_id
order by p.installation_id

-- name: write
-- Everything that a batch's decisions change, in one statement: both rows of each pair that moves, the comment, the
-- journal, the outbox, and the sweep's memory. By primary keys.
with decision as materialized (
    select *
    from jsonb_to_recordset(%(decisions)s::jsonb) as d (
        installation_id uuid,
        account_id uuid,
        member_id text,
        installation_from text,
        installation_to text,
        account_from text,
        account_to text,
        verdict text,
        reason text,
        outcome text,
        attempts integer,
        ttl_seconds bigint,
        age_seconds bigint,
        next_check_seconds float8,
        comment text,
        journal_id uuid,
        level text,
        message text,
        context jsonb
    )
),
moved_installation as (
    update {installations} i
    set status = d.installation_to,
        comment = d.comment,
        update_at_utc = now() at time zone %(zone)s
    from decision d
    where i.id = d.installation_id
        and d.outcome <> 'left'
        and i.status = d.installation_from
    returning i.id
),
moved_account as (
    update {accounts} a
    set status = d.account_to,
        comment = d.comment,
        updated_at_utc = now() at time zone %(zone)s
    from decision d
    where a.id = d.account_id
        and d.outcome <> 'left'
        and a.status = d.account_from
    returning a.id
),
journalled as (
    insert into {journal} (
        id, member_id, application_installation_id, created_at_utc, level, message, label,
        context_payload, context_bitrix24_user_id, context_ip_address
    )
    select d.journal_id, d.member_id, d.installation_id, now() at time zone %(zone)s, d.level, d.message, %(label)s,
           d.context::json, null, %(ip_address)s::bytea
    from decision d
    where btrim(coalesce(d.member_id, '')) <> ''
),
published as (
    insert into crm.outbox_messages (topic, key, aggregate_type, aggregate_id, contract_version, payload, headers)
    select '{topic}', d.installation_id::text, '{aggregate_type}', d.installation_id::text, {contract_version},
           jsonb_build_object(
               'InstallationId', d.installation_id,
               'AccountId', d.account_id,
               'MemberId', d.member_id,
               'InstallationFromStatus', d.installation_from,
               'InstallationToStatus', d.installation_to,
               'AccountFromStatus', d.account_from,
               'AccountToStatus', d.account_to,
               'Verdict', d.verdict,
               'Reason', d.reason,
               'TtlSeconds', d.ttl_seconds,
               'AgeSeconds', d.age_seconds,
               'RunId', %(run_id)s::uuid,
               'OccurredAt', now()
           ),
           jsonb_build_object('traceparent', %(traceparent)s::text)
    from decision d
    where d.outcome <> 'left'
),
remembered as (
    insert into crm.installation_checks as c (
        installation_id, verdict, reason, outcome, attempts, ttl_seconds, age_seconds, run_id, last_checked_at,
        next_check_at
    )
    select d.installation_id, d.verdict, d.reason, d.outcome, d.attempts, d.ttl_seconds, d.age_seconds, %(run_id)s,
           now(), now() + make_interval(secs => d.next_check_seconds)
    from decision d
    on conflict (installation_id) do update
    set verdict = excluded.verdict,
        reason = excluded.reason,
        outcome = excluded.outcome,
        attempts = excluded.attempts,
        ttl_seconds = excluded.ttl_seconds,
        age_seconds = excluded.age_seconds,
        run_id = excluded.run_id,
        last_checked_at = excluded.last_checked_at,
        next_check_at = excluded.next_check_at,
        claimed_until = null,
        claimed_by = null,
        overridden_at = null
)
select (select count(*) from moved_installation) as moved_installations,
       (select count(*) from moved_account) as moved_accounts,
       (select count(*) from decision d where d.outcome <> 'left') as expected

-- name: give_back
-- Gives up what is left of a run's claims, but for those whose tokens may be used up: a claim that runs out tells
-- the next run of it. By ix_installation_checks_claimed_by.
update crm.installation_checks c
set claimed_until = null,
    claimed_by = null
where c.claimed_by = %(run_id)s
    and c.installation_id <> all(%(unsettled)s::uuid[])

-- name: find_overridden
-- Installations that the sweep had moved and that are active again: a finish step that had read them before our
-- commit wrote after it, or a person unblocked them. By ix_installation_checks_swept.
select c.installation_id, c.verdict, c.outcome, c.run_id as swept_by, i.status as installation_status,
       a.status as account_status, a.member_id
from crm.installation_checks c
join {installations} i on i.id = c.installation_id
left join {accounts} a on a.id = i.bitrix_24_account_id
where c.outcome in ('blocked', 'deleted')
    and c.overridden_at is null
    and i.status = 'active'
order by c.installation_id
limit 1000
for no key update of c skip locked

-- name: note_overridden
-- Journals them, once.
with overridden as (
    select *
    from jsonb_to_recordset(%(overridden)s::jsonb) as o (
        installation_id uuid, member_id text, journal_id uuid, message text, context jsonb
    )
),
journalled as (
    insert into {journal} (
        id, member_id, application_installation_id, created_at_utc, level, message, label,
        context_payload, context_bitrix24_user_id, context_ip_address
    )
    select o.journal_id, o.member_id, o.installation_id, now() at time zone %(zone)s, 'warning', o.message, %(label)s,
           o.context::json, null, %(ip_address)s::bytea
    from overridden o
    where btrim(coalesce(o.member_id, '')) <> ''
)
update crm.installation_checks c
set overridden_at = now()
from overridden o
where c.installation_id = o.installation_id

-- name: named
-- Why installations that were named are (not) swept: their status, age and claim. By primary key.
select n.id as installation_id,
       i.status,
       extract(epoch from now() - (i.created_at_utc at time zone %(zone)s))::float8 as age_seconds,
       coalesce(c.claimed_until > now(), false) as claimed
from unnest(%(ids)s::uuid[]) as n (id)
left join {installations} i on i.id = n.id
left join crm.installation_checks c on c.installation_id = n.id
order by n.id
