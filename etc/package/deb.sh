# shellcheck shell=sh
is_later() { dpkg --compare-versions "$1" gt "$2"; }

case $DPKG_MAINTSCRIPT_NAME:$1 in
    # Without a second argument there was never another version.
    preinst:install | preinst:upgrade) refuse_downgrade "${2:-}" "@VERSION@" ;;
    postinst:configure)
        make_user
        after_install "${2:+yes}"
        ;;
    prerm:remove) before_removal ;;
    postrm:remove) after_removal ;;
    postrm:purge) after_purge ;;
esac
