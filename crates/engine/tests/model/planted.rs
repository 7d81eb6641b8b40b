//! Planted errors, each found by the property that is meant for it.

use crate::handover::{
    ALONE, DISCARDED, KNOWS, LOST_PAGES, ONE_RUNS, THREW_AWAY, TWO_HISTORIES, TWO_RUNNING,
};
use crate::mutation::{self, CORRECT, Rules};
use crate::world::Budget;
use crate::{NONE, TWO_ATTEMPTS_AND_A_CRASH, found};

#[test]
fn finds_a_source_that_continues_after_committed() {
    let rules = Rules { source: mutation::source_continues_after_committed, ..CORRECT };
    found(rules, Budget { troubles: 1, ..NONE }, false, &[TWO_RUNNING]);
}

#[test]
fn finds_a_destination_that_says_running_before_the_last_page() {
    let rules = Rules { destination: mutation::destination_says_running_too_early, ..CORRECT };
    found(rules, Budget { post_copy: true, ..NONE }, false, &[LOST_PAGES]);
}

#[test]
fn finds_a_source_that_ends_when_the_destination_lacks_pages() {
    let rules = Rules { source: mutation::source_ends_at_incomplete, ..CORRECT };
    found(rules, Budget { post_copy: true, ..NONE }, false, &[LOST_PAGES]);
}

#[test]
fn finds_a_destination_that_discards_in_doubt() {
    let rules = Rules { destination: mutation::destination_discards_in_doubt, ..CORRECT };
    found(rules, Budget { troubles: 1, ..NONE }, false, &[ALONE]);
}

#[test]
fn finds_a_destination_that_runs_in_doubt() {
    let rules = Rules { destination: mutation::destination_runs_in_doubt, ..CORRECT };
    found(rules, Budget { troubles: 2, ..NONE }, false, &[TWO_RUNNING]);
}

#[test]
fn finds_a_go_for_an_old_incarnation_that_is_obeyed() {
    let rules = Rules { destination: mutation::destination_obeys_any_go, ..CORRECT };
    let budget = Budget { attempts: 2, duplicates: 1, qemu_deaths: 1, troubles: 1, ..NONE };
    found(rules, budget, false, &[TWO_RUNNING]);
}

#[test]
fn finds_go_sent_before_it_is_journalled() {
    let rules = Rules { source: mutation::source_sends_go_first, ..CORRECT };
    found(rules, Budget { agent_crashes: 1, ..NONE }, false, &[TWO_RUNNING]);
}

#[test]
fn finds_a_source_that_aborts_when_restarted_in_committed() {
    let rules = Rules { source: mutation::source_aborts_when_restarted, ..CORRECT };
    found(rules, Budget { agent_crashes: 1, ..NONE }, false, &[TWO_RUNNING]);
}

#[test]
fn finds_a_source_that_does_not_hold_its_qemu() {
    let rules = Rules { source: mutation::source_does_not_hold_qemu, holds: false, ..CORRECT };
    found(rules, Budget { foreign_conts: 1, ..NONE }, false, &[TWO_RUNNING]);
}

#[test]
fn finds_a_source_that_permits_ready_before_it_holds_its_qemu() {
    let rules = Rules { holds: false, ..CORRECT };
    found(rules, Budget { foreign_conts: 1, qemu_deaths: 1, ..NONE }, false, &[TWO_HISTORIES]);
}

#[test]
fn finds_a_source_that_lets_the_destination_wait_for_lost_data() {
    let rules = Rules { after_phases: |_| None, ..CORRECT };
    found(rules, Budget { qemu_deaths: 1, ..NONE }, false, &[ONE_RUNS]);
}

#[test]
fn finds_a_source_that_reclaims_without_winning() {
    let rules = Rules { source: mutation::source_reclaims_without_winning, ..CORRECT };
    found(rules, Budget { troubles: 1, ..NONE }, true, &[TWO_RUNNING]);
}

#[test]
fn finds_aborted_that_is_not_synced() {
    let rules = Rules { source: mutation::source_does_not_sync_aborted, ..CORRECT };
    found(rules, Budget { host_crashes: 1, troubles: 1, ..NONE }, false, &[TWO_HISTORIES]);
}

#[test]
fn finds_a_destination_that_does_not_ask_the_registry() {
    let rules = Rules { destination: mutation::destination_skips_registry, ..CORRECT };
    found(rules, Budget { troubles: 1, ..NONE }, true, &[TWO_RUNNING]);
}

#[test]
fn finds_ready_sent_before_it_is_journalled() {
    let rules = Rules { destination: mutation::destination_sends_ready_first, ..CORRECT };
    found(rules, Budget { agent_crashes: 1, ..NONE }, false, &[ALONE]);
}

#[test]
fn finds_starting_that_is_not_journalled() {
    let rules = Rules { destination: mutation::destination_does_not_journal_starting, ..CORRECT };
    let budget = Budget { agent_crashes: 1, qemu_deaths: 1, ..NONE };
    found(rules, budget, false, &[TWO_HISTORIES]);
}

#[test]
fn finds_a_destination_that_refuses_and_keeps_ownership() {
    let rules = Rules { destination: mutation::destination_refuses_and_keeps, ..CORRECT };
    found(rules, Budget { qemu_deaths: 1, ..NONE }, true, &[ONE_RUNS]);
}

#[test]
fn finds_a_destination_that_refuses_after_cont() {
    let rules = Rules { destination: mutation::destination_refuses_after_cont, ..CORRECT };
    found(rules, Budget { qemu_deaths: 1, ..NONE }, false, &[TWO_HISTORIES]);
}

#[test]
fn finds_a_rebooted_journal_that_is_trusted() {
    let rules = Rules { destination: mutation::destination_trusts_a_rebooted_journal, ..CORRECT };
    found(rules, Budget { host_crashes: 1, ..NONE }, false, &[TWO_HISTORIES]);
}

#[test]
fn finds_a_destination_that_says_crashed_while_it_asks() {
    let rules = Rules { destination: mutation::destination_says_crashed_while_it_asks, ..CORRECT };
    found(rules, Budget { host_crashes: 2, in_flight: 2, ..NONE }, false, &[THREW_AWAY]);
}

#[test]
fn finds_a_source_that_says_aborted_after_it_returned() {
    let rules = Rules { source: mutation::source_says_aborted_after_it_returned, ..CORRECT };
    let budget = Budget { host_crashes: 1, decisions: 1, troubles: 1, in_flight: 2, ..NONE };
    found(rules, budget, false, &[THREW_AWAY]);
}

#[test]
fn finds_a_refused_copy_that_is_run() {
    let rules = Rules { destination: mutation::destination_runs_a_refused_copy, ..CORRECT };
    found(rules, Budget { cont_failures: 1, duplicates: 1, ..NONE }, false, &[DISCARDED]);
}

/// The model found this error in the engine itself.
#[test]
fn finds_a_destination_that_trusts_the_preflight_record() {
    let rules = Rules { destination: mutation::destination_knows_preflight_only, ..CORRECT };
    found(rules, TWO_ATTEMPTS_AND_A_CRASH, true, &[ONE_RUNS]);
}

#[test]
fn finds_a_source_that_goes_on_without_committed() {
    let rules = Rules { enters_without_entry: |_, _| true, ..CORRECT };
    let budget = Budget { journal_failures: 1, agent_crashes: 1, ..NONE };
    found(rules, budget, false, &[TWO_RUNNING]);
}

#[test]
fn finds_a_destination_that_forgets_a_fact_not_journalled() {
    let rules = Rules { destination_failed: |_, _| None, ..CORRECT };
    found(rules, Budget { journal_failures: 1, qemu_deaths: 1, ..NONE }, false, &[ONE_RUNS]);
}

#[test]
fn finds_a_destination_whose_facts_are_overtaken() {
    let rules = Rules { destination_admits: |_, _| true, ..CORRECT };
    found(rules, Budget { journal_failures: 1, qemu_deaths: 1, ..NONE }, false, &[KNOWS]);
}

#[test]
fn finds_a_destination_that_puts_a_refused_fact_behind_others() {
    let rules = Rules { destination_failed: mutation::destination_defers_facts, ..CORRECT };
    found(rules, Budget { journal_failures: 2, qemu_deaths: 1, ..NONE }, false, &[KNOWS]);
}
