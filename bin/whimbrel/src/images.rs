//! Images that VMs left on this host when they migrated away with their disks, or ended.

use api::report::bytes;
use api::{Client, LeftoverImage, VmName};

use crate::Code;
use crate::failure::Failure;
use crate::output::{Output, Text, table};

/// `whimbrel images list`.
pub(crate) fn list(client: &Client, output: &Output) -> Result<Code, Failure> {
    output.show(&client.images()?, |images: &Vec<LeftoverImage>| {
        if images.is_empty() {
            return "no VM has left an image on this host\n".to_owned();
        }
        table(["MIGRATION", "TO", "DISK", "TAKES", "IMAGE", "REMARK"], images.iter().map(row))
    });
    Ok(Code::Done)
}

fn row(image: &LeftoverImage) -> [String; 6] {
    [
        image.migration.to_string(),
        if image.ended { "ended or forgotten".to_owned() } else { image.to.to_string() },
        image.disk.clone(),
        bytes(image.used_bytes),
        image.path.display().to_string(),
        match &image.blocked_by {
            Some(why) => format!("kept: {why}"),
            None if image.ended => "can be removed (--ended); there may be no other copy".to_owned(),
            None => "can be removed".to_owned(),
        },
    ]
}

/// `whimbrel images remove`.
pub(crate) fn remove(
    client: &Client,
    vm: &VmName,
    epoch: Option<u64>,
    ended: bool,
    output: &Output,
) -> Result<Code, Failure> {
    let removed = if ended { client.remove_ended_images(vm)? } else { client.remove_images(vm, epoch)? };
    output.show(&removed, |images: &Vec<LeftoverImage>| {
        let mut text = Text::default();
        for LeftoverImage { path, used_bytes, .. } in images {
            text.line(format_args!("{} is removed; it took {}", path.display(), bytes(*used_bytes)));
        }
        text.finish()
    });
    Ok(Code::Done)
}
