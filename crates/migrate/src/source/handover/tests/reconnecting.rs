//! Tests of new connections for pages that follow the guest.

use super::*;
use crate::source::post_copy_server::PostCopyServer;
use crate::source::stages::SourceStage;
use ::memory::RecentWrites;

/// Returns a driver whose destination runs the guest, and has lost its connections for pages.
fn cut(world: &World) -> (SourceDriver, Arc<MigrationControls>) {
    let state = SourceState::Committed { incarnation: incarnation(), run: true, has_run: true };
    let (mut driver, _, controls) = driver(world, state, None);
    let (remaining, rate) = (driver.telemetry.remaining(), Arc::clone(&controls.rate));
    let server = PostCopyServer::new(Vec::new().into(), RecentWrites::default(), remaining, rate);
    driver.resources.stage = SourceStage::resumed(server);
    (driver, controls)
}

/// The last messages arrive over it.
#[test]
fn running_during_a_reconnection_keeps_the_control_stream() {
    let world = World::new();
    let (mut driver, controls) = cut(&world);
    let reconnects = thread::spawn(move || {
        driver.reconnect_serving();
        driver
    });
    let mut peer = world.accept();
    assert_eq!(peer.receive_message(), Message::Resume);
    peer.send_message(&running());
    let driver = reconnects.join().unwrap();
    assert!(matches!(driver.session.state(), SourceState::Done { .. }));
    assert!(driver.connections.control.is_some());
    assert_eq!(controls.report(|report| report.reconnections), 0);
}

#[test]
fn an_attempt_with_a_lost_control_stream_is_followed_by_another() {
    let world = World::new();
    let (mut driver, _) = cut(&world);
    for generation in [2, 3] {
        let reconnects = thread::spawn(move || {
            driver.reconnect_serving();
            driver
        });
        let mut peer = world.accept();
        assert_eq!(peer.receive_message(), Message::Resume);
        drop(peer);
        driver = reconnects.join().unwrap();
        assert!(driver.connections.control.is_none());
        assert_eq!(driver.connections.generation, Generation(generation));
    }
}
