//! Two teams that share each kernel's work over a connection, as two virtual machines do.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use whimbrel_nas::class::Class;
use whimbrel_nas::exchange::Peer;
use whimbrel_nas::kernel::{Kernel, Verdict};
use whimbrel_nas::{cg, ep, ft, is, mg, team};

/// Does two runs, one after the other, on both sides; returns the verdicts of both.
fn share<K: Kernel>(kernel: &K, threads: usize) -> [Verdict; 4] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let runs = |peer: &Peer| {
        team::run(threads, Some(peer), |member| {
            Ok([kernel.run(member, &mut |_| ())?, kernel.run(member, &mut |_| ())?])
        })
        .unwrap()
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| runs(&Peer::connect(&address, "test", Duration::from_secs(10)).unwrap()));
        let [first, second] = runs(&Peer::accept(&listener, "test").unwrap());
        let [third, fourth] = other.join().unwrap();
        [first, second, third, fourth]
    })
}

fn verifies<K: Kernel>(kernel: &K) {
    for threads in [1, 2] {
        let verdicts = share(kernel, threads);
        assert!(verdicts[0].verified, "{threads} threads each: {}", verdicts[0]);
        // To the last digit.
        assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0]));
    }
}

#[test]
fn ep_verifies_on_both_sides() {
    verifies(&ep::Problem::new(Class::S));
}

#[test]
fn cg_verifies_on_both_sides() {
    verifies(&cg::Problem::new(Class::S));
}

#[test]
fn is_verifies_on_both_sides() {
    verifies(&is::Problem::new(Class::S));
}

#[test]
fn mg_verifies_on_both_sides() {
    verifies(&mg::Problem::new(Class::S));
}

#[test]
fn ft_verifies_on_both_sides() {
    verifies(&ft::Problem::new(Class::S));
}
