//! Injection leaves no trace in the other process.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::{Victim, injector, soak};
use whimbrel_tracee::{InjectError, Injector};

/// Number of injected system calls; the design requires ten thousand.
const INJECTIONS: usize = 10_000;

/// Returns the names of the victim's threads. Each is tried in a victim of its own: all of them at
/// once keep two processors so busy that every stop needs milliseconds.
fn kinds() -> Vec<String> {
    let mut names: Vec<String> = Victim::start(&["list"]).threads.clone().into_keys().collect();
    names.push("main".into());
    assert!(names.len() > 20);
    names
}

fn inject(injector: &Injector, victim: &Victim, times: usize) {
    for (name, &thread) in victim.threads.iter().cycle().take(times) {
        injector.use_only_thread(thread);
        if let Err(error) = injector.create_userfaultfd(&victim.process) {
            panic!("into thread {name}: {error:?}");
        }
    }
}

#[test]
fn ten_thousand_injections_leave_no_trace() {
    let injector = injector();
    let count = if soak() { 20 * INJECTIONS } else { INJECTIONS };
    let kinds = kinds();
    for kind in &kinds {
        let mut victim = Victim::start(&[kind]);
        let before = victim.process.descriptors().unwrap().len();
        // Into the thread of this kind, and into the main thread, which reads from a pipe.
        inject(&injector, &victim, count / kinds.len() + 1);
        assert_eq!(victim.process.descriptors().unwrap().len(), before);
        victim.assert_goes_on();
        victim.assert_well();
    }
    // All of them together.
    let mut victim = Victim::start(&[]);
    inject(&injector, &victim, 100);
    victim.assert_goes_on();
    victim.assert_well();
}

#[test]
fn the_injector_is_killed_at_every_step() {
    killed_at_every_step(|injector, victim| injector.create_userfaultfd(&victim.process).map(|_| None));
}

/// A userfaultfd that was to stay in the process does not, unless an agent uses it.
#[test]
fn the_injector_is_killed_at_every_step_of_leaving_one() {
    killed_at_every_step(|injector, victim| {
        injector.create_lasting_userfaultfd(&victim.process).map(|left| Some(left.there))
    });
}

/// Creates userfaultfds with `make`, which returns the number of one that stays in the process.
fn killed_at_every_step(make: impl Fn(&Injector, &Victim) -> Result<Option<i32>, InjectError>) {
    let mut steps = 0;
    let mut leftovers = 0;
    for kind in kinds() {
        let injector = injector();
        let mut victim = Victim::start(&[&kind]);
        let left = make(&injector, &victim).unwrap();
        steps = injector.steps_taken();
        assert!(steps > 10);
        if let Some(there) = left {
            assert_eq!(injector.close_leftovers(&victim.process, &[]).unwrap(), 0, "it is in use");
            injector.close_lasting(&victim.process, there).unwrap();
        }
        assert_eq!(victim.userfaultfds(), 0);
        let thread = victim.threads[&kind];
        for step in 1..=steps {
            injector.use_only_thread(thread);
            injector.die_at_step(step);
            match make(&injector, &victim) {
                Err(InjectError::Killed { .. }) => {}
                // A signal that has to be passed on first is an additional step; the first run had one.
                Ok(left) if injector.steps_taken() < step => {
                    injector.die_at_step(0);
                    if let Some(there) = left {
                        injector.close_lasting(&victim.process, there).unwrap();
                    }
                }
                other => panic!("{kind}, step {step}: {other:?}"),
            }
        }
        injector.use_only_thread(0);
        injector.die_at_step(0);
        leftovers += injector.close_leftovers(&victim.process, &[]).unwrap();
        assert_eq!(victim.userfaultfds(), 0);
        victim.assert_goes_on();
        inject(&injector, &victim, 2);
        victim.assert_goes_on();
        victim.assert_well();
    }
    println!("{steps} steps, {leftovers} userfaultfds were left and closed");
    assert!(leftovers > 0);
}

/// Retries, because the kill of the last injector may be detected only now.
fn inject_after_a_kill(injector: &Injector, victim: &Victim) {
    while let Err(error) = injector.create_userfaultfd(&victim.process) {
        assert!(matches!(error, InjectError::Killed { .. }), "{error:?}");
    }
}

#[test]
fn the_injector_is_killed_at_any_time() {
    let mut seed = 4711u64;
    let (mut killed, mut finished) = (0, 0);
    for kind in kinds() {
        let injector = injector();
        let mut victim = Victim::start(&[&kind]);
        injector.use_only_thread(victim.threads[&kind]);
        for _ in 0..if soak() { 1000 } else { 12 } {
            inject_after_a_kill(&injector, &victim);
            let pid = injector.injector_pid().unwrap() as i32;
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let delay = Duration::from_nanos((seed >> 33) % 300_000);
            std::thread::scope(|scope| {
                let injection = scope.spawn(|| injector.create_userfaultfd(&victim.process));
                let began = std::time::Instant::now();
                while began.elapsed() < delay {
                    std::hint::spin_loop();
                }
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGKILL).unwrap();
                match injection.join().unwrap() {
                    Ok(_) => finished += 1,
                    Err(InjectError::Killed { .. }) => killed += 1,
                    Err(error) => panic!("{error:?}"),
                }
            });
        }
        inject_after_a_kill(&injector, &victim);
        injector.close_leftovers(&victim.process, &[]).unwrap();
        assert_eq!(victim.userfaultfds(), 0);
        victim.assert_goes_on();
        victim.assert_well();
    }
    println!("{killed} were killed in the middle, {finished} were not");
    assert!(killed > 0);
}

#[test]
fn a_killed_injector_does_not_shorten_a_continued_sleep() {
    let injector = injector();
    // The injector is killed after the call was made and before the thread is restored.
    let victims: Vec<Victim> = (6..12)
        .map(|step| {
            let victim = Victim::start(&["mode-sleep"]);
            while !victim.process.read("syscall").unwrap().starts_with("230 ") {
                assert!(victim.process.is_alive());
            }
            injector.create_userfaultfd(&victim.process).unwrap();
            injector.die_at_step(step);
            injector.create_userfaultfd(&victim.process).unwrap_err();
            injector.die_at_step(0);
            victim
        })
        .collect();
    for victim in victims {
        victim.assert_well();
    }
}

#[test]
fn a_call_that_does_not_return_is_left_to_its_frame() {
    // Created in this order, so that a failing test ends the injector first, which may hold the victim.
    let mut victim = Victim::start(&["mode-linger"]);
    let injector = injector();
    injector.use_only_thread(victim.threads["worker"]);
    let socket = u64::from(victim.threads["socket"]);
    let error = injector.close_there(&victim.process, &[socket]).unwrap_err();
    assert!(matches!(error, InjectError::Late { call: "close", .. }), "{error:?}");
    let path = victim.process.path(&format!("task/{}/status", victim.threads["worker"]));
    let status = std::fs::read_to_string(path).unwrap();
    assert!(status.contains("TracerPid:\t0\n"), "the injector has let go: {status}");
    assert_eq!(victim.ask("drain"), "goes on");
    injector.create_userfaultfd(&victim.process).unwrap();
    assert_eq!(victim.userfaultfds(), 0);
    victim.assert_well();
}

#[test]
fn a_signal_on_its_way_survives_the_injector() {
    for kind in ["signals-while-computing", "signals"] {
        let injector = injector();
        let mut victim = Victim::start(&[kind]);
        injector.use_only_thread(victim.threads[kind]);
        // The first stop, which is that of a signal if one arrives first.
        injector.die_at_step(3);
        for _ in 0..if soak() { 5000 } else { 200 } {
            let result = injector.create_userfaultfd(&victim.process);
            assert!(matches!(result, Err(InjectError::Killed { .. })), "{result:?}");
        }
        victim.assert_goes_on();
        victim.assert_well();
    }
}
