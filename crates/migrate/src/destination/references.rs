//! Content of this host to which the source may refer instead of sending it: templates, and images that both hosts
//! have.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use proto::message::Proposal;
use qemu::describe::VmDescription;
use tracing::warn;

use super::DestinationDriver;
use super::inbox::DestinationNotice;
use host::templates::{AdvertisedTemplates, SharedImage, shared_images};
use host::{ArrivingVm, Context};

impl DestinationDriver {
    /// Answers the source's query for pages among this host's templates.
    pub(super) fn query_templates(&mut self, hashes: Vec<String>) {
        let Some(pages) = self.resources.stage.pages() else {
            return self.fail("nothing is being received");
        };
        let advertised = Arc::clone(pages.advertised());
        if !advertised.is_first() {
            return self.fail("the source queries templates a second time");
        }
        let (context, mailbox) = (Arc::clone(&self.context), self.inbox.mailbox());
        let choose = move || {
            for message in advertised.choose(&context.templates, &hashes) {
                if !mailbox.put(DestinationNotice::Reply(Box::new(message))) {
                    return;
                }
            }
        };
        // Without a thread the source waits a while and goes on without templates.
        if let Err(error) = thread::Builder::new().name("choose".to_owned()).spawn(choose) {
            warn!(migration = %self.terms.migration, %error, "cannot start a thread to look for templates");
        }
    }
}

/// Returns the content of this host to which the source of an arriving VM may refer.
pub(super) fn advertised(context: &Context, proposal: &Proposal, vm: &ArrivingVm) -> AdvertisedTemplates {
    let patience = Duration::from_millis(context.config.timeouts.qmp_ms);
    AdvertisedTemplates::new(vm.artifacts.directory.clone(), patience, shared_with_source(proposal))
}

/// Returns the images that both hosts have, as far as this host knows them by now: copied disks have no layers here.
fn shared_with_source(proposal: &Proposal) -> Vec<SharedImage> {
    let described = serde_json::from_value::<VmDescription>(proposal.description.clone());
    described.map_or_else(|_| Vec::new(), |vm| shared_images(&vm.disks, |_| false))
}
