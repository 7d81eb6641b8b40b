//! Class W, with numbers of threads that divide nothing evenly.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use whimbrel_nas::class::Class;
use whimbrel_nas::kernel::Kernel;
use whimbrel_nas::{cg, ep, ft, is, mg, team};

fn verifies<K: Kernel>(kernel: &K) {
    for threads in [3, 7] {
        let verdict = team::run(threads, None, |member| kernel.run(member, &mut |_| ())).unwrap();
        assert!(verdict.verified, "{threads} threads: {verdict}");
    }
}

#[test]
fn ep_verifies() {
    verifies(&ep::Problem::new(Class::W));
}

#[test]
fn cg_verifies() {
    verifies(&cg::Problem::new(Class::W));
}

#[test]
fn is_verifies() {
    verifies(&is::Problem::new(Class::W));
}

#[test]
fn mg_verifies() {
    verifies(&mg::Problem::new(Class::W));
}

#[test]
fn ft_verifies() {
    verifies(&ft::Problem::new(Class::W));
}
